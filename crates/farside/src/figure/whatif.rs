//! What a system would do on other machines: its round trips and bytes, latency and throughput, on each platform, over
//! each network.

use super::load::{Bed, Load, Variant, system};
use farside_bench::report::Table;
use farside_sim::hardware::{Distance, INPUTS, Platform, Testbed};
use serde::Serialize;

/// What is asked of the system.
#[derive(Clone, Copy, Debug)]
pub struct Question {
    /// The system's kind.
    pub system: &'static str,
    /// The share of operations that are GETs.
    pub reads: f64,
    /// Bytes of a value.
    pub value_len: usize,
    /// Gb/s of the node's link.
    pub link_gbit: u64,
    /// Operations that each point is measured over.
    pub operations: u64,
}

/// What is predicted on one platform over one network.
#[derive(Clone, Debug, Serialize)]
pub struct Answer {
    /// The system.
    pub system: &'static str,
    /// The platform.
    pub platform: &'static str,
    /// The network.
    pub network: &'static str,
    /// Of one operation, on average, as all that follows.
    pub round_trips: f64,
    /// With those of packets.
    pub bytes_in: f64,
    /// With those of packets.
    pub bytes_out: f64,
    /// With one client.
    pub low_load_us: f64,
    /// With as many clients as do any good.
    pub peak_ops_per_s: f64,
    /// So many.
    pub peak_clients: u32,
    /// With so many.
    pub peak_us: f64,
}

/// Every platform that the system runs on, over every network.
///
/// # Errors
/// A simulated operation failed.
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
        value_len: question.value_len,
    };
    let curve = Bed::new(load, 1)?.curve(question.operations)?;
    let peak = curve.iter().max_by(|one, other| one.ops_per_s.total_cmp(&other.ops_per_s));
    let (low, peak) = (curve[0], peak.expect("a curve begins with one client"));
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

/// For people.
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
        "there, us",
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
