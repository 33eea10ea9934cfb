//! Results of a comparison: the rates of each contender, by setting and round, and the ratio of each rate to the
//! better rival's rate.
//!
//! Invariant: a ratio is computed within one round, from measurements that are close in time. Reports have the median
//! of ratios, not the ratio of medians.

use crate::report::{Latencies, LatencyUs, Spread, Table};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Number of cores that client and server use.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cores {
    /// Client and server have one core each.
    Two,
    /// Client and server share one core.
    One,
}

/// How a client waits for an answer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Client {
    /// The client sleeps until the kernel wakes it.
    Sleeps,
    /// The client polls its socket.
    Looks,
}

/// Setting that all contenders of a group share.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Number of operations in flight for each client thread.
    pub depth: u32,
    /// Number of client threads.
    pub threads: u32,
    /// Cores of client and server, and how the client waits; `None` without a server.
    pub served: Option<(Cores, Client)>,
}

/// Results of one contender with one setting.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Operations per second in each round.
    pub rates: Vec<f64>,
    /// Ratios of the contender's rate to the better rival's rate, one for each round with a rival.
    pub ratios: Vec<f64>,
    /// Latencies of the operations of all rounds.
    pub latencies: Latencies,
    /// Number of operations of all rounds together.
    pub operations: u64,
    /// CPU time that the client's process used for these operations.
    pub client_cpu: Duration,
    /// CPU time that the server's process used for these operations; `None` without a server.
    pub server_cpu: Option<Duration>,
}

/// One line of `farside bench compare --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompareReport {
    /// Name of the contender, for example `redis mget` or `farside udp`.
    pub contender: String,
    /// Release of the contender.
    pub version: String,
    /// Name or path of the workload.
    pub workload: String,
    /// Name of the effective request distribution.
    pub distribution: String,
    /// Number of records in the store.
    pub records: u64,
    /// Length of a value in bytes.
    pub value_size: u64,
    /// Number of client threads, each with one connection.
    pub threads: u32,
    /// Number of operations in flight for each client thread.
    pub depth: u32,
    /// Number of batches; null if the contender forms the batches itself.
    pub batches: Option<u32>,
    /// Number of cores of client and server; null without a server.
    pub cores: Option<Cores>,
    /// How a client waits for an answer; null without a server.
    pub client: Option<Client>,
    /// Number of rounds that were measured.
    pub rounds: u64,
    /// Operations per second of all clients together.
    pub ops_per_s: Spread,
    /// Latency of an operation in microseconds, sampled from about 1 in 64; null if not reported.
    pub latency_us: Option<LatencyUs>,
    /// CPU time in seconds for a million operations; null if unknown.
    pub cpu_s_per_mop: Option<Sides>,
    /// Ratio of the contender's rate to the rate of the better of Redis and memcached; null if neither was measured.
    pub of_better_rival: Option<Spread>,
    /// Whether the rival's own benchmark measured this result, instead of this program.
    pub is_cross_check: bool,
}

/// CPU time of client and server, in seconds for a million operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sides {
    /// CPU time of the client's process, in seconds for a million operations.
    pub client: f64,
    /// CPU time of the server's process, in seconds for a million operations; null without a server. The resolution is
    /// 10 ms for all operations of a round together.
    pub server: Option<f64>,
}

impl Measured {
    /// Returns the CPU time for a million operations, or `None` without operations.
    pub fn cpu_s_per_mop(&self) -> Option<Sides> {
        let per_mop = |cpu: Duration| cpu.as_secs_f64() / self.operations as f64 * 1e6;
        let sides = Sides { client: per_mop(self.client_cpu), server: self.server_cpu.map(per_mop) };
        (self.operations > 0).then_some(sides)
    }
}

/// Returns a table of the reports of one group.
pub fn table(reports: &[CompareReport]) -> Table {
    let mut table = Table::new([
        "contender",
        "ops/s",
        "min..max",
        "p50 us",
        "p99 us",
        "client s/Mop",
        "server s/Mop",
        "in batches",
        "of the better rival",
    ]);
    for report in reports {
        let Spread { median, min, max } = report.ops_per_s;
        let or_dash = |text: Option<String>| text.unwrap_or_else(|| "-".into());
        let us = |of: fn(&LatencyUs) -> f64| or_dash(report.latency_us.as_ref().map(|us| short(of(us))));
        let (client, server) = match report.cpu_s_per_mop {
            Some(sides) => (Some(sides.client), sides.server),
            None => (None, None),
        };
        table.push([
            report.contender.clone(),
            rate(median),
            format!("{}..{}", rate(min), rate(max)),
            us(|us| us.p50),
            us(|us| us.p99),
            or_dash(client.map(|seconds| format!("{seconds:.2}"))),
            or_dash(server.map(|seconds| format!("{seconds:.2}"))),
            or_dash(report.batches.map(|batches| format!("{batches} x {}", report.depth / batches.max(1)))),
            or_dash(report.of_better_rival.map(|ratio| format!("{:.2}", ratio.median))),
        ]);
    }
    table
}

/// Formats a rate in operations per second as millions or thousands.
fn rate(per_second: f64) -> String {
    match per_second {
        r if r >= 999_500.0 => format!("{:.2} M", r / 1e6),
        r => format!("{:.0} k", r / 1e3),
    }
}

fn short(us: f64) -> String {
    if us < 100.0 { format!("{us:.2}") } else { format!("{us:.0}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_spread_has_median_minimum_and_maximum() {
        let spread = |numbers: &[f64]| Spread::of(numbers);
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[3.0]), Some(Spread { median: 3.0, min: 3.0, max: 3.0 }));
        assert_eq!(spread(&[9.0, 1.0, 4.0]), Some(Spread { median: 4.0, min: 1.0, max: 9.0 }));
        assert_eq!(spread(&[9.0, 1.0, 4.0, 5.0]), Some(Spread { median: 4.5, min: 1.0, max: 9.0 }));
    }

    #[test]
    fn cpu_time_is_reported_for_a_million_operations() {
        let measured = Measured {
            operations: 500_000,
            client_cpu: Duration::from_millis(250),
            server_cpu: Some(Duration::from_secs(1)),
            ..Measured::default()
        };
        assert_eq!(measured.cpu_s_per_mop(), Some(Sides { client: 0.5, server: Some(2.0) }));
        assert_eq!(Measured::default().cpu_s_per_mop(), None);
    }

    fn report() -> CompareReport {
        CompareReport {
            contender: "redis".into(),
            version: "7".into(),
            workload: "c".into(),
            distribution: "uniform".into(),
            records: 10,
            value_size: 512,
            threads: 1,
            depth: 64,
            batches: Some(2),
            cores: Some(Cores::Two),
            client: Some(Client::Sleeps),
            rounds: 3,
            ops_per_s: Spread { median: 450_000.0, min: 430_000.0, max: 1_470_000.0 },
            latency_us: Some(LatencyUs {
                mean: 131.5,
                min: 2.5,
                p50: 130.4,
                p95: 140.0,
                p99: 99.5,
                p999: 1.0,
                max: 300.0,
            }),
            cpu_s_per_mop: Some(Sides { client: 0.5, server: None }),
            of_better_rival: None,
            is_cross_check: false,
        }
    }

    #[test]
    fn the_fields_are_those_that_scripts_rely_on() {
        let expected = serde_json::json!({
            "contender": "redis", "version": "7", "workload": "c", "distribution": "uniform", "records": 10,
            "value_size": 512, "threads": 1, "depth": 64, "batches": 2, "cores": "two", "client": "sleeps",
            "rounds": 3, "ops_per_s": {"median": 450_000.0, "min": 430_000.0, "max": 1_470_000.0},
            "latency_us": {
                "mean": 131.5, "min": 2.5, "p50": 130.4, "p95": 140.0, "p99": 99.5, "p999": 1.0, "max": 300.0,
            },
            "cpu_s_per_mop": {"client": 0.5, "server": null}, "of_better_rival": null, "is_cross_check": false,
        });
        assert_eq!(serde_json::to_value(report()).unwrap(), expected);
    }

    #[test]
    fn an_unknown_value_prints_as_a_dash() {
        let text = table(&[report()]).to_string();
        let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["redis", "450", "k", "430", "k..1.47", "M", "130", "99.50", "0.50", "-", "2", "x", "32", "-"]
        );
    }
}
