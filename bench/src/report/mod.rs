//! Reports of measurements: a line of JSON for scripts, and a table for people.
//!
//! Invariant: scripts rely on the names of JSON fields, so the names never change. A field's name includes the unit,
//! unless it is a base unit.

mod cpu;
mod interval_log;
mod latency;
mod spread;
mod table;
mod ycsb_text;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

pub use cpu::{cpu_time_of, own_cpu_time};
pub use hdrhistogram::serialization::V2DeflateSerializer;
pub use interval_log::IntervalLog;
pub use latency::Latencies;
pub use spread::Spread;
pub use table::Table;
pub use ycsb_text::{load_text, ycsb_text};

use crate::floor::{Echoed, Measured, Workload};

/// The result of `farside bench ycsb` and of `farside bench blocks`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct YcsbReport {
    /// Kind of the system, such as `prism-kv`.
    pub system: String,
    /// Fabric that carried the requests, such as `shm`.
    pub fabric: String,
    /// Name or path of the workload.
    pub workload: String,
    /// Name of the effective request distribution.
    pub distribution: String,
    /// Number of records at the start.
    pub records: u64,
    /// Length of a value in bytes.
    pub value_size: u64,
    /// Scheme by which clients synchronize; only of stores of latched objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scheme: Option<String>,
    /// Kind of the keys: `numbers` or `emails`; only of indexes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys: Option<String>,
    /// Techniques that the index uses, if fewer than all were asked for: the name of the last one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rung: Option<String>,
    /// Number of replicas of each record; absent if the store keeps no replicas.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replicas: Option<u64>,
    /// Number of client threads.
    pub threads: u64,
    /// Number of tasks of each thread. Each task has one operation in flight.
    pub tasks: u64,
    /// Scheduled operations per second; null for a closed loop.
    pub target_ops_per_s: Option<f64>,
    /// Whether values were verified, and every key was checked to behave as one register.
    pub verified: bool,
    /// Report of the load phase; null if the records existed before.
    pub load: Option<LoadReport>,
    /// Measured time in seconds, of all repeats together.
    pub seconds: f64,
    /// Fraction of the table's slots that are in use; null if the system has no table.
    pub load_factor: Option<f64>,
    /// Average number of slots probed by a read; null if the system does not probe.
    pub mean_probes: Option<f64>,
    /// Size in bytes of a page of the memory that was read; null if unknown.
    pub page_size: Option<u64>,
    /// Operations per second of all clients together: the median of all repeats.
    pub ops_per_s: f64,
    /// Operations per second of all clients together, for each repeat.
    pub repeats_ops_per_s: Vec<f64>,
    /// Latency of an operation in microseconds, of all repeats. With a schedule, a latency starts when the operation
    /// was due.
    pub latency_us: LatencyUs,
    /// Report of each kind of operation, by the kind's name.
    pub operations: BTreeMap<String, OperationReport>,
    /// Average number of requests and bytes of an operation on the fabric.
    pub per_op: PerOp,
    /// CPU time of client and node, in seconds for a million operations.
    pub cpu_s_per_mop: CpuSeconds,
    /// Number of failed operations.
    pub errors: u64,
    /// Number of reads with a wrong result.
    pub violations: u64,
    /// Longest time in milliseconds in which a task ended no operation; only of block stores. Pauses between operations
    /// do not count.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub longest_stall_ms: Option<f64>,
    /// Number of records that a new client has read and checked after the run; only of block stores with verification,
    /// and of latched objects.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_back: Option<u64>,
    /// Numbers of events in the operations of the clients of an index or of a key-value store, by name, warm-ups
    /// included. Sizes, whose names end with `bytes`, are those of all clients of one repeat.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub index: BTreeMap<String, u64>,
    /// Number of records of a transaction; only of transactional stores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keys_per_transaction: Option<u64>,
    /// Fraction of the attempts that met another transaction and were repeated; warm-ups included. Only of
    /// transactional stores.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub abort_rate: Option<f64>,
    /// Numbers of events in the transactions of all clients, by name, warm-ups included.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub transactions: BTreeMap<String, u64>,
    /// Report of each kind of transaction, by the kind's name; only of benchmarks with several kinds.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub mix: BTreeMap<String, KindReport>,
    /// The calls of an operation; only of `bench rpc`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub calls: Option<CallsReport>,
    /// Report of each node of the store, if each task keeps to the keys of one node.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub nodes: Vec<NodeReport>,
}

/// Calls: an operation is a batch of them.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CallsReport {
    /// Number of nodes that answer.
    pub nodes: u64,
    /// Number of requests of a batch.
    pub batch: u64,
    /// Length of a request in bytes.
    pub request_bytes: u64,
    /// Length of a response in bytes.
    pub response_bytes: u64,
    /// Number of requests per second of all clients together: the median of all repeats.
    pub requests_per_s: f64,
    /// The floor: messages of about these lengths that are written by hand. Absent if there are several nodes or
    /// threads, or if the fabric sends no messages.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub floor: Option<FloorReport>,
}

/// Operations of the tasks that keep to one node.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct NodeReport {
    /// Url of the node.
    pub url: String,
    /// Number of operations that succeeded.
    pub operations: u64,
    /// Number of operations that failed.
    pub errors: u64,
    /// Operations per second that succeeded, for each repeat.
    pub repeats_ops_per_s: Vec<f64>,
}

/// Report of a kind of transaction. All but the rate includes warm-ups.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct KindReport {
    /// Transactions of this kind per second of all clients together, over all repeats.
    pub ops_per_s: f64,
    /// Number of transactions that have committed.
    pub commits: u64,
    /// Fraction of the committed transactions that have found their rows, and whose conditions held.
    pub success_rate: f64,
    /// Fraction of the attempts that met another transaction and were repeated.
    pub abort_rate: f64,
    /// Number of transactions that ended with an error.
    pub errors: u64,
}

impl KindReport {
    /// Adds the transactions of another process, which ran at the same time.
    pub fn add(&mut self, other: &KindReport) {
        let each = [&*self, other];
        let commits = each.map(|kind| kind.commits as f64);
        let found: f64 = each.iter().zip(commits).map(|(kind, commits)| kind.success_rate * commits).sum();
        let abort_rate =
            aborts_of_all(each.iter().zip(commits).map(|(kind, commits)| (commits, kind.abort_rate)));
        let all = commits[0] + commits[1];
        *self = KindReport {
            ops_per_s: self.ops_per_s + other.ops_per_s,
            commits: self.commits + other.commits,
            success_rate: if all > 0.0 { found / all } else { 0.0 },
            abort_rate,
            errors: self.errors + other.errors,
        };
    }
}

/// Fraction of all attempts that met another transaction, of parts that have committed so much, with such a fraction
/// each.
pub fn aborts_of_all(parts: impl IntoIterator<Item = (f64, f64)>) -> f64 {
    let (mut commits, mut attempts) = (0.0, 0.0);
    for (committed, abort_rate) in parts.into_iter().filter(|(_, abort_rate)| *abort_rate < 1.0) {
        commits += committed;
        attempts += committed / (1.0 - abort_rate);
    }
    if attempts > 0.0 { 1.0 - commits / attempts } else { 0.0 }
}

/// Report of the load phase, which puts the records.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LoadReport {
    /// Number of records loaded.
    pub records: u64,
    /// Duration of the load phase in seconds.
    pub seconds: f64,
    /// Number of records loaded per second.
    pub ops_per_s: f64,
    /// Latency of a put in microseconds.
    pub latency_us: LatencyUs,
}

/// Report of one kind of operation.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct OperationReport {
    /// Number of operations done.
    pub count: u64,
    /// Latency of an operation in microseconds; `None` if none was timed. With a schedule, a latency starts when the
    /// operation was due.
    pub latency_us: Option<LatencyUs>,
    /// Service time of an operation in microseconds, from start to end; only with a schedule.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub service_us: Option<LatencyUs>,
}

/// Average, extremes and percentiles of a latency, in microseconds.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct LatencyUs {
    /// Average latency.
    pub mean: f64,
    /// Shortest latency.
    pub min: f64,
    /// Median latency.
    pub p50: f64,
    /// 95th percentile of the latency.
    pub p95: f64,
    /// 99th percentile of the latency.
    pub p99: f64,
    /// 99.9th percentile of the latency.
    pub p999: f64,
    /// Longest latency.
    pub max: f64,
}

impl From<&Latencies> for LatencyUs {
    fn from(latencies: &Latencies) -> Self {
        let [p50, p95, p99, p999] = [50.0, 95.0, 99.0, 99.9].map(|percent| latencies.percentile_us(percent));
        let (mean, min, max) = (latencies.mean_us(), latencies.min_us(), latencies.max_us());
        Self { mean, min, p50, p95, p99, p999, max }
    }
}

/// Averages of one operation's costs on the fabric.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct PerOp {
    /// Number of round trips: the length of the longest sequence of requests in which each request depends on the
    /// reply to the one before.
    pub round_trips: f64,
    /// Number of chains sent.
    pub requests: f64,
    /// Number of bytes of requests.
    pub bytes_out: f64,
    /// Number of bytes of replies.
    pub bytes_in: f64,
    /// Number of CAS and FETCH-ADD ops sent.
    pub atomics: f64,
}

/// CPU time of client and node, in seconds for a million operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct CpuSeconds {
    /// CPU time of the client's process, in seconds for a million operations.
    pub client: f64,
    /// CPU time of the memory node's process, in seconds for a million operations; null if there is no other process,
    /// or it is not visible.
    pub node: Option<f64>,
}

/// The result of `farside bench floor`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct FloorReport {
    /// Fabric whose physical floor was measured.
    pub fabric: String,
    /// Name of the workload.
    pub workload: String,
    /// Number of operations in flight.
    pub tasks: u64,
    /// Size in bytes of a page of the memory that was accessed.
    pub page_size: u64,
    /// Median time of one operation, or of one batch if several are in flight, in microseconds.
    pub rtt_us_p50: f64,
    /// Number of operations per second, without the pauses between them.
    pub ops_per_s: f64,
    /// CPU time of client and server; absent if both are one process. The resolution of the server's time is 10 ms in
    /// total.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpu_s_per_mop: Option<EchoCpuSeconds>,
}

/// CPU time of the two processes of an echo, in seconds for a million operations.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct EchoCpuSeconds {
    /// CPU time of the client's process, in seconds for a million operations.
    pub client: f64,
    /// CPU time of the server's process, in seconds for a million operations.
    pub server: f64,
}

impl FloorReport {
    /// Creates the report of the floor of `fabric` with `tasks` operations in flight.
    pub fn new(fabric: impl Into<String>, workload: Workload, tasks: usize, measured: &Measured) -> Self {
        Self {
            fabric: fabric.into(),
            workload: workload.name().into(),
            tasks: tasks as u64,
            page_size: measured.page_size,
            rtt_us_p50: measured.rtt_us_p50,
            ops_per_s: measured.ops_per_s,
            cpu_s_per_mop: None,
        }
    }

    /// Creates the report of the floor of `fabric` with `tasks` requests in flight to an echo server.
    pub fn of_echo(
        fabric: impl Into<String>,
        workload: Workload,
        tasks: usize,
        page_size: u64,
        echoed: &Echoed,
        cpu_s_per_mop: EchoCpuSeconds,
    ) -> Self {
        Self {
            fabric: fabric.into(),
            workload: workload.name().into(),
            tasks: tasks as u64,
            page_size,
            rtt_us_p50: echoed.rtt_us_p50,
            ops_per_s: echoed.ops_per_s,
            cpu_s_per_mop: Some(cpu_s_per_mop),
        }
    }
}

/// Returns a table of reports, one report in each row.
pub fn ycsb_table(reports: &[YcsbReport]) -> Table {
    let mut table = Table::new([
        "system",
        "fabric",
        "workload",
        "keys",
        "load",
        "probes",
        "page",
        "ops/s",
        "p50 us",
        "p99 us",
        "p99.9 us",
        "trips/op",
        "requests/op",
        "B out/op",
        "B in/op",
        "atomics/op",
        "client s/Mop",
        "node s/Mop",
        "errors",
        "violations",
    ]);
    for report in reports {
        table.push([
            report.system.clone(),
            report.fabric.clone(),
            report.workload.clone(),
            report.distribution.clone(),
            or_dash(report.load_factor, 2),
            or_dash(report.mean_probes, 2),
            report.page_size.map_or_else(dash, page),
            rate(report.ops_per_s),
            format!("{:.2}", report.latency_us.p50),
            format!("{:.2}", report.latency_us.p99),
            format!("{:.2}", report.latency_us.p999),
            format!("{:.2}", report.per_op.round_trips),
            format!("{:.2}", report.per_op.requests),
            format!("{:.0}", report.per_op.bytes_out),
            format!("{:.0}", report.per_op.bytes_in),
            format!("{:.2}", report.per_op.atomics),
            format!("{:.2}", report.cpu_s_per_mop.client),
            or_dash(report.cpu_s_per_mop.node, 2),
            report.errors.to_string(),
            report.violations.to_string(),
        ]);
    }
    table
}

/// Returns a table of a report's kinds of operations, one kind in each row.
pub fn operations_table(report: &YcsbReport) -> Table {
    let mut table = Table::new(["operation", "count", "mean us", "p50", "p95", "p99", "p99.9", "max"]);
    let mut row = |name: &str, count: u64, latency: Option<&LatencyUs>| {
        let all = |of: &LatencyUs| [of.mean, of.p50, of.p95, of.p99, of.p999, of.max];
        let times =
            latency.map_or([const { None }; 6], |latency| all(latency).map(Some)).map(|us| or_dash(us, 2));
        table.push([name.to_owned(), count.to_string()].into_iter().chain(times));
    };
    for (name, done) in &report.operations {
        row(name, done.count, done.latency_us.as_ref());
        if let Some(service) = &done.service_us {
            row("  since begun", done.count, Some(service));
        }
    }
    table
}

/// Returns a table of a report's kinds of transactions, one kind in each row.
pub fn mix_table(mix: &BTreeMap<String, KindReport>) -> Table {
    let mut table = Table::new(["transaction", "share %", "per second", "success %", "aborts %"]);
    let all: f64 = mix.values().map(|kind| kind.ops_per_s).sum();
    for (name, kind) in mix {
        let percent = |share: f64| format!("{:.2}", 100.0 * share);
        table.push([
            name.clone(),
            percent(if all > 0.0 { kind.ops_per_s / all } else { 0.0 }),
            rate(kind.ops_per_s),
            percent(kind.success_rate),
            percent(kind.abort_rate),
        ]);
    }
    table
}

/// Returns a table of reports, one report in each row.
pub fn floor_table(reports: &[FloorReport]) -> Table {
    let has_sides = reports.iter().any(|report| report.cpu_s_per_mop.is_some());
    let sides = ["client s/Mop", "server s/Mop"];
    let columns = ["fabric", "workload", "tasks", "page", "p50 us", "ops/s"];
    let mut table = Table::new(columns.into_iter().chain(sides.into_iter().filter(|_| has_sides)));
    for report in reports {
        let mut row = vec![
            report.fabric.clone(),
            report.workload.clone(),
            report.tasks.to_string(),
            page(report.page_size),
            format!("{:.2}", report.rtt_us_p50),
            rate(report.ops_per_s),
        ];
        if let Some(cpu) = report.cpu_s_per_mop {
            row.extend([format!("{:.2}", cpu.client), format!("{:.2}", cpu.server)]);
        }
        table.push(row);
    }
    table
}

/// Formats a rate in a short form: `7.13 M`, `630 k`, `42`.
fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 999_500.0 => format!("{:.2} M", r / 1e6),
        r if r >= 999.5 => format!("{:.0} k", r / 1e3),
        r => format!("{r:.0}"),
    }
}

fn page(bytes: u64) -> String {
    if bytes >= 1 << 20 { format!("{} MiB", bytes >> 20) } else { format!("{} KiB", bytes >> 10) }
}

fn or_dash(number: Option<f64>, digits: usize) -> String {
    number.map_or_else(dash, |number| format!("{number:.digits$}"))
}

fn dash() -> String {
    "-".to_owned()
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    const LATENCY: LatencyUs =
        LatencyUs { mean: 0.75, min: 0.25, p50: 0.5, p95: 1.0, p99: 1.5, p999: 9.0, max: 99.5 };

    fn ycsb() -> YcsbReport {
        YcsbReport {
            system: "prism-kv".to_owned(),
            fabric: "shm".to_owned(),
            workload: "c".to_owned(),
            distribution: "zipfian".to_owned(),
            records: 1000,
            value_size: 512,
            scheme: None,
            calls: None,
            keys: None,
            rung: None,
            replicas: None,
            threads: 1,
            tasks: 16,
            target_ops_per_s: None,
            verified: false,
            load: None,
            seconds: 4.0,
            load_factor: Some(0.25),
            mean_probes: None,
            page_size: Some(4096),
            ops_per_s: 2_500_000.0,
            repeats_ops_per_s: vec![2_500_000.0],
            latency_us: LATENCY,
            operations: BTreeMap::from([(
                "read".to_owned(),
                OperationReport { count: 10_000_000, latency_us: Some(LATENCY), service_us: None },
            )]),
            per_op: PerOp { round_trips: 1.0, requests: 1.0, bytes_out: 40.0, bytes_in: 544.0, atomics: 0.0 },
            cpu_s_per_mop: CpuSeconds { client: 0.4, node: Some(0.0) },
            errors: 0,
            violations: 0,
            longest_stall_ms: None,
            read_back: None,
            index: BTreeMap::new(),
            keys_per_transaction: None,
            abort_rate: None,
            mix: BTreeMap::new(),
            transactions: BTreeMap::new(),
            nodes: Vec::new(),
        }
    }

    fn floor() -> FloorReport {
        FloorReport {
            fabric: "shm".to_owned(),
            workload: "c".to_owned(),
            tasks: 16,
            page_size: 2 << 20,
            rtt_us_p50: 1.4,
            ops_per_s: 11_500_000.0,
            cpu_s_per_mop: None,
        }
    }

    fn echo() -> FloorReport {
        let echoed =
            Echoed { ops: 44, seconds: 1e-5, ops_per_s: 4_400_000.0, rtt_us_p50: 14.5, mismatches: 0 };
        let cpu = EchoCpuSeconds { client: 0.25, server: 0.25 };
        FloorReport::of_echo("udp", Workload::A, 64, 4096, &echoed, cpu)
    }

    #[test]
    fn the_fields_are_those_that_scripts_rely_on() {
        let latency =
            json!({"mean": 0.75, "min": 0.25, "p50": 0.5, "p95": 1.0, "p99": 1.5, "p999": 9.0, "max": 99.5});
        let expected = json!({
            "system": "prism-kv", "fabric": "shm", "workload": "c", "distribution": "zipfian", "records": 1000,
            "value_size": 512, "threads": 1, "tasks": 16, "target_ops_per_s": null, "verified": false, "load": null,
            "seconds": 4.0, "load_factor": 0.25, "mean_probes": null, "page_size": 4096, "ops_per_s": 2_500_000.0,
            "repeats_ops_per_s": [2_500_000.0], "latency_us": latency,
            "operations": {"read": {"count": 10_000_000, "latency_us": latency}},
            "per_op": {"round_trips": 1.0, "requests": 1.0, "bytes_out": 40.0, "bytes_in": 544.0, "atomics": 0.0},
            "cpu_s_per_mop": {"client": 0.4, "node": 0.0}, "errors": 0, "violations": 0,
        });
        assert_eq!(serde_json::to_value(ycsb()).unwrap(), expected);
        let expected = json!({
            "fabric": "shm", "workload": "c", "tasks": 16, "page_size": 2_097_152, "rtt_us_p50": 1.4,
            "ops_per_s": 11_500_000.0,
        });
        assert_eq!(serde_json::to_value(floor()).unwrap(), expected);
        let expected = json!({
            "fabric": "udp", "workload": "a", "tasks": 64, "page_size": 4096, "rtt_us_p50": 14.5,
            "ops_per_s": 4_400_000.0,
            "cpu_s_per_mop": {"client": 0.25, "server": 0.25},
        });
        assert_eq!(serde_json::to_value(echo()).unwrap(), expected);
    }

    #[test]
    fn a_report_is_one_line_and_reads_back() {
        let line = serde_json::to_string(&ycsb()).unwrap();
        assert!(line.starts_with(r#"{"system":"prism-kv","fabric":"shm","workload":"c","distribution":"#));
        assert!(!line.contains('\n'));
        assert_eq!(serde_json::from_str::<YcsbReport>(&line).unwrap(), ycsb());
    }

    #[test]
    fn tables_have_a_heading_and_a_line_a_report() {
        let table = ycsb_table(&[ycsb(), ycsb()]).to_string();
        assert_eq!(table.lines().count(), 3);
        assert!(table.contains("2.50 M") && table.contains("4 KiB"), "{table}");
        let table = floor_table(&[floor()]).to_string();
        assert_eq!(
            table,
            "fabric  workload  tasks  page   p50 us  ops/s\nshm     c            16  2 MiB    1.40  11.50 M\n"
        );
        let table = floor_table(&[echo()]).to_string();
        assert!(
            table.ends_with("\nudp     a            64  4 KiB   14.50  4.40 M          0.25          0.25\n"),
            "{table}"
        );
    }

    #[test]
    fn the_text_has_ycsbs_format() {
        let mut report = ycsb();
        let lines = |text: &str| text.lines().map(str::to_owned).collect::<Vec<_>>();
        let read = [
            "[READ], Operations, 10000000",
            "[READ], AverageLatency(us), 0.75",
            "[READ], MinLatency(us), 0.25",
            "[READ], MaxLatency(us), 99.5",
            "[READ], 95thPercentileLatency(us), 1",
            "[READ], 99thPercentileLatency(us), 1.5",
        ];
        let overall = ["[OVERALL], RunTime(ms), 4000", "[OVERALL], Throughput(ops/sec), 2500000"];
        let ok = ["[READ], Return=OK, 10000000"];
        assert_eq!(lines(&ycsb_text(&report)), [&overall[..], &read, &ok].concat());
        report.operations.get_mut("read").unwrap().service_us = Some(LatencyUs { mean: 0.5, ..LATENCY });
        report.load =
            Some(LoadReport { records: 1000, seconds: 0.5, ops_per_s: 2000.0, latency_us: LATENCY });
        let text = ycsb_text(&report);
        for line in [
            "[OVERALL], RunTime(ms), 500",
            "[INSERT], Return=OK, 1000",
            "[READ], AverageLatency(us), 0.5",
            "[Intended-READ], AverageLatency(us), 0.75",
        ] {
            assert!(text.lines().any(|other| other == line), "{line} is missing: {text}");
        }
    }

    #[test]
    fn rates_print_in_short_form() {
        let rates = [0.0, 42.4, 999.4, 999.6, 630_000.0, 999_600.0, 7_134_000.0].map(rate);
        assert_eq!(rates, ["0", "42", "999", "1 k", "630 k", "1.00 M", "7.13 M"]);
    }
}
