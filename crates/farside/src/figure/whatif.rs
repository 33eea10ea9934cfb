//! Predicts a system's round trips, bytes, latency and throughput on each platform, over each network.

use farside_bench::report::Table;
use farside_bench::workload::Lengths;
use farside_predict::{Bed, Load, Variant, system};
use farside_sim::hardware::{Distance, INPUTS, Platform, Testbed};
use serde::Serialize;

/// The system and the workload to predict.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// Kind of the system.
    pub system: &'static str,
    /// Share of operations that are GETs, 0 to 1; the others are PUTs. In a transactional store, a GET reads
    /// [`Question::keys`] records in one transaction, and a PUT reads and writes them. A GET by FaSST's calls is a
    /// short request with a value in its response, and a PUT a request with a value and a short response.
    pub reads: f64,
    /// Number of records of an operation: 1, except in transactional stores.
    pub keys: usize,
    /// Bytes of a value, of the longest if lengths vary.
    pub value_len: usize,
    /// Distribution of the lengths of values.
    pub lengths: Lengths,
    /// Bandwidth of the node's link, in Gb/s.
    pub link_gbit: u64,
    /// Number of simulated operations per measured point.
    pub operations: u64,
}

/// The prediction for one platform and one network.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// Kind of the system.
    pub system: &'static str,
    /// Name of the platform.
    pub platform: &'static str,
    /// Name of the network.
    pub network: &'static str,
    /// Mean number of round trips of an operation. If the system has several nodes, mean per node.
    pub round_trips: f64,
    /// Mean number of bytes that an operation sends to all nodes, with packet headers.
    pub bytes_in: f64,
    /// Mean number of bytes that an operation receives from all nodes, with packet headers.
    pub bytes_out: f64,
    /// Mean latency with one client, in microseconds.
    pub low_load_us: f64,
    /// Highest throughput, in operations per second.
    pub peak_ops_per_s: f64,
    /// Number of clients at the highest throughput.
    pub peak_clients: u32,
    /// Mean latency at the highest throughput, in microseconds.
    pub peak_us: f64,
}

/// Predicts the system on every platform that can run it, over every network.
///
/// # Errors
/// The system is unknown, or a simulated operation failed.
pub fn ask(question: &Question) -> Result<Vec<Answer>, String> {
    let mut answers = Vec::new();
    let needs = system(question.system)?.needs;
    let platforms = Platform::ALL.into_iter().filter(|platform| platform.capabilities().contains(needs));
    for platform in platforms {
        for distance in Distance::ALL {
            answers.push(answer(question, platform, distance)?);
        }
    }
    Ok(answers)
}

fn answer(question: &Question, platform: Platform, distance: Distance) -> Result<Answer, String> {
    let testbed = Testbed { distance, link_gbit: question.link_gbit, ..Testbed::PRISM_APPLICATIONS };
    let load = Load {
        system: question.system,
        variant: Variant::OURS,
        platform,
        testbed,
        inputs: INPUTS,
        reads: question.reads,
        keys: question.keys,
        value_len: question.value_len,
        lengths: question.lengths,
        skew: 0.0,
        records: None,
        cached: 0,
    };
    let curve = Bed::new(load, 1)?.curve(question.operations)?;
    let peak = curve.iter().max_by(|one, other| one.ops_per_s.total_cmp(&other.ops_per_s));
    let (low, peak) = (curve[0], peak.expect("a curve has at least one point"));
    Ok(Answer {
        system: question.system,
        platform: platform.name(),
        network: distance.name(),
        round_trips: low.round_trips,
        bytes_in: low.bytes_in,
        bytes_out: low.bytes_out,
        low_load_us: low.mean_us,
        peak_ops_per_s: peak.ops_per_s,
        peak_clients: peak.clients,
        peak_us: peak.mean_us,
    })
}

/// Formats the predictions as a table for people.
pub fn table(answers: &[Answer]) -> String {
    let mut table = Table::new([
        "platform",
        "network",
        "round trips",
        "bytes in",
        "bytes out",
        "low load, us",
        "peak, k/s",
        "clients",
        "at peak, us",
    ]);
    for answer in answers {
        table.push([
            answer.platform.to_owned(),
            answer.network.to_owned(),
            format!("{:.2}", answer.round_trips),
            format!("{:.0}", answer.bytes_in),
            format!("{:.0}", answer.bytes_out),
            format!("{:.2}", answer.low_load_us),
            format!("{:.1}", answer.peak_ops_per_s / 1e3),
            answer.peak_clients.to_string(),
            format!("{:.1}", answer.peak_us),
        ]);
    }
    table.to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_table_has_a_line_for_each_answer() {
        let answer = |network| Answer {
            system: "pilaf",
            platform: "bluefield",
            network,
            round_trips: 1.5,
            bytes_in: 100.0,
            bytes_out: 200.4,
            low_load_us: 12.5,
            peak_ops_per_s: 1_234_567.0,
            peak_clients: 96,
            peak_us: 77.77,
        };
        let table = table(&[answer("direct"), answer("rack")]);
        let lines: Vec<Vec<&str>> = table.lines().map(|line| line.split_whitespace().collect()).collect();
        assert_eq!(lines.len(), 3, "{table}");
        assert_eq!(lines[1], ["bluefield", "direct", "1.50", "100", "200", "12.50", "1234.6", "96", "77.8"]);
        assert_eq!(lines[2][1], "rack");
    }
}
