import { useEffect } from "react";
import { Link } from "wouter";
import { useJob, useWatchedJob } from "../data";
import { Failure } from "../ui/notice";
import { StateLabel } from "../ui/state";
import { Checkpoints } from "./Checkpoints";

export default function CheckpointsPage({ id }: { id: string }) {
  useWatchedJob(id);
  const { value: job, error } = useJob(id);
  useEffect(() => {
    document.title = `Checkpoints of ${job?.name ?? "a job"} · Holdfast`;
  }, [job?.name]);
  return (
    <div className="page">
      <header>
        <h1>
          <Link to={`/jobs/${encodeURIComponent(id)}`}>{job?.name ?? "…"}</Link> <span className="dim">/ Checkpoints</span>
        </h1>
        {job && <StateLabel state={job.state} chip />}
      </header>
      {error && <Failure error={error} />}
      <div className="card">
        <Checkpoints id={id} />
      </div>
    </div>
  );
}
