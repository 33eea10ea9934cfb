//! Collects the outcome of a measurement over all clients and all repeats, and makes the report.

use super::subject::Subject;
use super::{Measured, Phases};
use farside_bench::driver::{ByKind, Tally, Work};
use farside_bench::kv::Counted;
use farside_bench::report::{CpuSeconds, LatencyUs, NodeReport, OperationReport, PerOp, Spread, YcsbReport};
use farside_fabrics::layer::count::Costs;
use farside_remote::Capabilities;
use farside_remote::arena::session::Counters;
use farside_systems::system::Family;
use std::collections::BTreeMap;
use std::time::Duration;

impl<S: Subject> Measured<S> {
    pub(super) fn report(&self, repeats: Vec<Outcome>, sampled: &Sampled) -> YcsbReport {
        let rates: Vec<f64> = repeats.iter().map(|ended| ended.operations_per_s).collect();
        let seconds = repeats.iter().map(|ended| ended.seconds).sum();
        let ended = repeats.into_iter().fold(Outcome::default(), Outcome::with_later);
        let tally = &ended.tally;
        let operations = tally.operations().max(1) as f64;
        if let Some(first) = tally.failures.first() {
            note!("farside: first failure: {first}");
        }
        let info = self.pool.nodes().find_map(|node| node.info().ok()); // The report is made even if the node is gone.
        let slots = match self.config.phases {
            _ if self.config.system.family == Family::Index || self.config.benchmark.is_some() => None,
            Phases::Run(_) => None, // The load may have used another table size.
            Phases::Both | Phases::Load(_) | Phases::Within(_) => {
                self.config.footprint().ok().map(|footprint| footprint.slots)
            }
        };
        let per_mop = |cpu: Duration| cpu.as_secs_f64() / operations * 1e6;
        let node = |(index, url): (usize, &String)| {
            let counted = || ended.by_node.iter().map(|repeat| (&repeat.counted[index], repeat.seconds));
            NodeReport {
                url: url.clone(),
                operations: counted().map(|(counted, _)| counted.done).sum(),
                errors: counted().map(|(counted, _)| counted.errors).sum(),
                repeats_ops_per_s: counted().map(|(counted, s)| counted.done as f64 / s).collect(),
            }
        };
        let is_txn = self.config.system.family == Family::Txn;
        let events = || ended.events.iter().map(|(name, count)| (name.replace(' ', "_"), *count)).collect();
        YcsbReport {
            nodes: self.members.iter().enumerate().map(node).collect(),
            system: self.config.system.kind.into(),
            fabric: self.pool.fabric().into(),
            workload: self.config.workload.name.clone(),
            distribution: self.config.workload.distribution.label(),
            records: self.config.workload.records,
            value_size: self.config.value_size as u64,
            scheme: None,
            calls: None,
            rung: self.config.rung.map(|rung| rung.name().to_owned()),
            keys: (self.config.system.family == Family::Index).then(|| self.config.names.name().to_owned()),
            replicas: self.config.replicas.map(u64::from),
            threads: self.config.threads.into(),
            tasks: self.config.tasks.into(),
            target_ops_per_s: self.config.target,
            verified: self.config.verify,
            load: self.load,
            seconds,
            load_factor: slots
                .filter(|slots| self.config.replicas.is_none() && *slots > 0)
                .map(|slots| self.config.workload.records as f64 / slots as f64),
            mean_probes: sampled.probes,
            page_size: info.map(|info| info.page_size),
            ops_per_s: Spread::of(&rates).expect("there is at least one repeat").median,
            repeats_ops_per_s: rates,
            latency_us: LatencyUs::from(&tally.latencies.all()),
            operations: operations_of(tally),
            per_op: if self.config.system.needs.contains(Capabilities::CALLS) {
                sampled.per_op() // Session slots count no calls.
            } else {
                PerOp {
                    round_trips: sampled.costs.round_trips as f64 / sampled.operations,
                    requests: ended.counters.chains as f64 / operations,
                    bytes_out: ended.counters.bytes_in as f64 / operations,
                    bytes_in: ended.counters.bytes_out as f64 / operations,
                    atomics: ended.counters.atomics as f64 / operations,
                }
            },
            cpu_s_per_mop: CpuSeconds { client: per_mop(ended.own_cpu), node: ended.node_cpu.map(per_mop) },
            errors: tally.errors,
            violations: tally.violations,
            longest_stall_ms: S::Work::TIMES_STALLS.then_some(tally.longest_stall.as_secs_f64() * 1e3),
            read_back: None,
            index: if is_txn { BTreeMap::new() } else { events() },
            keys_per_transaction: Some(self.config.keys_per_transaction as u64)
                .filter(|keys| is_txn && *keys > 0),
            abort_rate: None,
            mix: BTreeMap::new(),
            transactions: if is_txn { events() } else { BTreeMap::new() },
        }
    }
}

/// Returns the report of each kind of operation, by the kind's name.
fn operations_of(tally: &Tally) -> BTreeMap<String, OperationReport> {
    let of = |(kind, name): (usize, &&str)| {
        let latencies = |of: &ByKind| of.of(kind).map(LatencyUs::from);
        let done = OperationReport {
            count: tally.done[kind],
            latency_us: latencies(&tally.latencies),
            service_us: latencies(&tally.service),
        };
        ((*name).to_owned(), done)
    };
    tally.kinds.iter().enumerate().map(of).filter(|(_, done)| done.count > 0).collect()
}

/// Costs of a sample of operations, measured by a single client.
#[derive(Clone)]
pub(super) struct Sampled {
    pub(super) costs: Costs,
    pub(super) operations: f64,
    /// Mean number of probes per read, if reads probe.
    pub(super) probes: Option<f64>,
}

impl Sampled {
    fn per_op(&self) -> PerOp {
        let each = |count: u64| count as f64 / self.operations;
        PerOp {
            round_trips: each(self.costs.round_trips),
            requests: each(self.costs.requests + self.costs.calls),
            bytes_out: each(self.costs.bytes_out),
            bytes_in: each(self.costs.bytes_in),
            atomics: each(self.costs.atomics),
        }
    }
}

/// Outcome of a measurement for one client, or for all clients together.
#[derive(Default)]
pub(super) struct Outcome {
    pub(super) tally: Tally,
    pub(super) seconds: f64,
    pub(super) operations_per_s: f64,
    pub(super) counters: Counters,
    pub(super) own_cpu: Duration,
    pub(super) node_cpu: Option<Duration>,
    /// Operations of each node's tasks, for each repeat.
    pub(super) by_node: Vec<NodesDone>,
    /// Numbers of events in the operations of clients, by name, from the start of each repeat's warm-up on.
    pub(super) events: BTreeMap<&'static str, u64>,
}

/// Operations of each node's tasks in one repeat, and its length. Empty unless each task keeps to one node.
pub(super) struct NodesDone {
    pub(super) counted: Vec<Counted>,
    pub(super) seconds: f64,
}

impl Outcome {
    /// Adds the outcome of a later repeat.
    pub(super) fn with_later(mut self, later: Outcome) -> Outcome {
        self.tally.merge(later.tally);
        self.counters.add(&later.counters);
        self.own_cpu += later.own_cpu;
        self.by_node.extend(later.by_node);
        for (name, count) in later.events {
            let sum = self.events.entry(name).or_default();
            // Each repeat has new clients, so sizes are not added.
            *sum = if name.ends_with("bytes") { (*sum).max(count) } else { *sum + count };
        }
        self.node_cpu = match (self.node_cpu, later.node_cpu) {
            (Some(before), Some(later)) => Some(before + later),
            (before, later) => before.or(later),
        };
        self
    }

    /// Adds the outcome of a client that ran concurrently.
    pub(super) fn add(&mut self, other: Outcome) {
        self.operations_per_s += other.tally.operations() as f64 / other.seconds;
        self.seconds = self.seconds.max(other.seconds);
        self.tally.merge(other.tally);
        self.counters.add(&other.counters);
        // CPU times are those of whole processes, so every thread measures the total: the maximum is taken, not the
        // sum.
        self.own_cpu = self.own_cpu.max(other.own_cpu);
        self.node_cpu = self.node_cpu.max(other.node_cpu);
        self.add_events(other.events);
    }

    fn add_events(&mut self, others: BTreeMap<&'static str, u64>) {
        others.into_iter().for_each(|(name, count)| *self.events.entry(name).or_default() += count);
    }
}

pub(super) fn difference(now: Counters, before: Counters) -> Counters {
    Counters {
        chains: now.chains - before.chains,
        ops: now.ops - before.ops,
        bytes_in: now.bytes_in - before.bytes_in,
        bytes_out: now.bytes_out - before.bytes_out,
        atomics: now.atomics - before.atomics,
        not_ready: now.not_ready - before.not_ready,
        refused: now.refused - before.refused,
        retired: now.retired - before.retired,
    }
}
