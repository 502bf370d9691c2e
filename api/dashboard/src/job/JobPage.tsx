import { JobActions } from "../actions/JobActions";
import { Checkpoints } from "../checkpoints/Checkpoints";
import { useCluster, useJob, useWatchedJob } from "../data";
import { Failure } from "../ui/notice";
import { StateLabel } from "../ui/state";

export default function JobPage({ id }: { id: string }) {
  useWatchedJob(id);
  const job = useJob(id);
  const cluster = useCluster();
  return (
    <div className="page">
      <header>
        <h1>{job.value?.name ?? "…"}</h1>
        {job.value && <StateLabel state={job.value.state} chip />}
        <div className="actions">
          {job.value && <JobActions job={job.value} faultInjection={cluster.value?.fault_injection ?? false} onChanged={(changed) => job.set(() => changed)} />}
        </div>
      </header>
      {job.error && <Failure error={job.error} />}
      <section className="card" aria-label="Checkpoints">
        <Checkpoints id={id} />
      </section>
    </div>
  );
}
