//! What a comparison says: for each contender in each way what it did round after round, beside the better rival.
//!
//! Invariant: a ratio is taken within a round, of what was measured moments apart; its median is told, and not a ratio
//! of medians.

use crate::report::{Latencies, LatencyUs, Spread, Table};
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// Where the client and the server run.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Cores {
    /// Each on a core of its own.
    Two,
    /// Both on one.
    One,
}

/// How a client waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Client {
    /// It sleeps until it is woken.
    Sleeps,
    /// It looks for answers all the time.
    Looks,
}

/// The same for all contenders of a group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Way {
    /// Operations that each client thread has under way.
    pub depth: u32,
    /// Client threads.
    pub threads: u32,
    /// Nothing where there is no server: the client does it all.
    pub served: Option<(Cores, Client)>,
}

/// What one contender came to in one way.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Operations a second, of each round.
    pub rates: Vec<f64>,
    /// Of each round, how many times the better rival's rate that is; nothing where there was no rival.
    pub ratios: Vec<f64>,
    /// Of all rounds.
    pub latencies: Latencies,
    /// Of all rounds.
    pub operations: u64,
    /// CPU time of the process that asked, for these operations.
    pub client_cpu: Duration,
    /// CPU time of the process that answered.
    pub server_cpu: Option<Duration>,
}

/// One line of `farside bench compare --json`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct CompareReport {
    /// Who, such as `redis mget` or `farside udp`.
    pub contender: String,
    /// Which release.
    pub version: String,
    /// Name or path of the workload.
    pub workload: String,
    /// Name of the effective request distribution.
    pub distribution: String,
    /// Records in the store.
    pub records: u64,
    /// Bytes of a value.
    pub value_size: u64,
    /// Client threads, each with a connection.
    pub threads: u32,
    /// Operations that each has under way.
    pub depth: u32,
    /// In how many batches these travel; null where the contender sees to that.
    pub batches: Option<u32>,
    /// How many cores client and server have; null where there is no server.
    pub cores: Option<Cores>,
    /// How a client waits; null where there is nobody to wait for.
    pub client: Option<Client>,
    /// Of so many rounds.
    pub rounds: u64,
    /// Operations a second, by all clients.
    pub ops_per_s: Spread,
    /// Latency of an operation in microseconds, of one in about 64; null where it was not told.
    pub latency_us: Option<LatencyUs>,
    /// CPU time for a million operations, in seconds; null where it is not known.
    pub cpu_s_per_mop: Option<Sides>,
    /// How many times the rate of the better of Redis and memcached; null where neither was measured.
    pub of_better_rival: Option<Spread>,
    /// Measured by the rival's own benchmark, and not by this program.
    pub is_cross_check: bool,
}

/// CPU time of either side, in seconds for a million operations.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sides {
    /// The process that asked.
    pub client: f64,
    /// The process that answered, to 10 ms a round in all; null where there is none.
    pub server: Option<f64>,
}

impl Measured {
    /// CPU time for a million operations.
    pub fn cpu_s_per_mop(&self) -> Option<Sides> {
        let per_mop = |cpu: Duration| cpu.as_secs_f64() / self.operations as f64 * 1e6;
        let sides = Sides { client: per_mop(self.client_cpu), server: self.server_cpu.map(per_mop) };
        (self.operations > 0).then_some(sides)
    }
}

/// The reports of one group as a table.
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

/// Operations a second, in millions or thousands.
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
    fn a_spread_has_the_middle_and_both_ends() {
        let spread = |numbers: &[f64]| Spread::of(numbers);
        assert_eq!(spread(&[]), None);
        assert_eq!(spread(&[3.0]), Some(Spread { median: 3.0, min: 3.0, max: 3.0 }));
        assert_eq!(spread(&[9.0, 1.0, 4.0]), Some(Spread { median: 4.0, min: 1.0, max: 9.0 }));
        assert_eq!(spread(&[9.0, 1.0, 4.0, 5.0]), Some(Spread { median: 4.5, min: 1.0, max: 9.0 }));
    }

    #[test]
    fn cpu_time_is_told_for_a_million_operations() {
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
    fn what_is_not_known_is_a_dash() {
        let text = table(&[report()]).to_string();
        let row: Vec<&str> = text.lines().nth(1).unwrap().split_whitespace().collect();
        assert_eq!(
            row,
            ["redis", "450", "k", "430", "k..1.47", "M", "130", "99.50", "0.50", "-", "2", "x", "32", "-"]
        );
    }
}
