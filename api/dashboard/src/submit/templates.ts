/** Example specs. */

export interface Template {
  name: string;
  summary: string;
  text: string;
}

export const TEMPLATES: readonly Template[] = [
  {
    name: "Small language model",
    summary: "Four ranks on two nodes, and one standby",
    text: `# A Llama-style language model at byte level on the source of Python's standard library,
# which every machine has. Four ranks on two nodes, and one standby node.
name: stdlib-lm
recipe: pretrain
model: {dim: 128, layers: 4, heads: 4, kv_heads: 2, sequence_length: 256}
data: {source: python-stdlib, tokenizer: bytes}
train:
  steps: 300
  global_batch: 16
  micro_batch: 4
  optimizer: {name: adamw, lr: 3.0e-4}
  schedule: {name: cosine, warmup_steps: 20}
parallel: {dp_shard: 2, tp: 2}
resources: {workers_per_node: 2, standby_nodes: 1}
checkpoint:
  memory: {every_steps: 1}
  remote: {every_steps: 100, keep: 3}
`,
  },
  {
    name: "One rank",
    summary: "The smallest job",
    text: `# One rank on one node: checks that training works.
name: first-steps
model: {dim: 64, layers: 2, heads: 2, sequence_length: 128}
train:
  steps: 50
  global_batch: 8
  micro_batch: 8
  schedule: {name: constant, warmup_steps: 0}
`,
  },
  {
    name: "Replicas",
    summary: "Two replicas of the state: detects silent corruption",
    text: `# Two replicas of the whole state. Their digests are compared, so that a flipped bit
# is found within a step or two, and either of them can be lost without a copy.
name: replicated
model: {dim: 128, layers: 4, heads: 4, sequence_length: 256}
train: {steps: 500, global_batch: 16, micro_batch: 4}
parallel: {dp_replicate: 2, dp_shard: 2}
resources: {workers_per_node: 2, standby_nodes: 1}
checks: {replica_digest_every_steps: 1}
`,
  },
  {
    name: "A script of your own",
    summary: "As torchrun starts it, unchanged",
    text: `# Your script runs on every rank, with the environment that torchrun sets. Choose its
# file or folder under "Code"; once it is uploaded, \`code\` is its id.
name: my-script
script: train.py
code: .
program: {metrics: "(step|iter) (?P<step>[0-9]+):? loss (?P<loss>[-+.e0-9]+)"}
parallel: {dp_shard: 2}
resources: {workers_per_node: 2}
`,
  },
  {
    name: "A function of your own",
    summary: "Called in Holdfast's steps: its state outlives every fault",
    text: `# Holdfast calls your function on every rank with a context: main(ctx). Choose its
# file or folder under "Code"; once it is uploaded, \`code\` is its id.
name: my-function
function: train:main
code: .
train: {steps: 300, global_batch: 256, micro_batch: 64}
parallel: {dp_shard: 2}
resources: {standby_nodes: 1}
`,
  },
  {
    name: "On GPUs",
    summary: "Sharded over eight GPUs of a node, bfloat16, S3",
    text: `# Sharded over eight GPUs. Both tiers choose their save intervals.
name: llama-gpu
model: {dim: 2048, layers: 16, heads: 16, kv_heads: 8, sequence_length: 2048, dtype: bfloat16}
data: {source: "/data/corpus/*.txt"}
train:
  steps: 20000
  global_batch: 256
  micro_batch: 4
  optimizer: {lr: 3.0e-4, weight_decay: 0.1}
  schedule: {name: cosine, warmup_steps: 1000}
parallel: {dp_shard: 4, tp: 2}
resources: {cpus_per_worker: 4, gpus_per_worker: 1, workers_per_node: 8, standby_nodes: 1}
checkpoint:
  memory: {every_steps: auto}
  remote: {uri: "s3://bucket/prefix", every_steps: auto, keep: 3}
`,
  },
];
