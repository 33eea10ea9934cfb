//! `whatif`: predicts a system's performance on other machines.

use super::{Done, Failure, warn_of_unused};
use farside::figure::whatif::{self, Question};
use farside_bench::txn::KEYS_MAX;
use farside_bench::workload::{Lengths, Operation, Workload};
use farside_predict as predict;
use farside_systems::registry::default_kv;
use farside_systems::system::Family;

/// Predict a system's latency and throughput on each platform, over each network
#[derive(clap::Args)]
pub(super) struct WhatIf {
    #[arg(long, value_name = "NAME", default_value = default_kv().kind, value_parser = system)]
    #[arg(help = format!("{}; block stores have 3 replicas", predict::names()))]
    system: &'static str,
    /// a, b, c, a YCSB property file, or terms like reads=0.95,value=512: the share of reads, and the bytes per value.
    /// The distribution of keys in a file has no effect. Operations of a transactional store are transactions, which
    /// read their records, or read and write them. A read of rpc-echo is a call with a request of 8 bytes and a value
    /// in its response; an update is the reverse
    #[arg(long, value_name = "a|b|c|PATH|reads=R,value=BYTES", default_value = "c")]
    workload: String,
    /// Number of records of a transaction, only for transactional stores [default: 2]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u64).range(1..=KEYS_MAX as u64))]
    keys: Option<u64>,
    /// Speed of the node's link, in Gb/s
    #[arg(long, value_name = "GBIT", default_value_t = 40, value_parser = clap::value_parser!(u64).range(1..=1_000))]
    link: u64,
    /// Simulated operations per point
    #[arg(long, value_name = "N", default_value_t = 10_000)]
    #[arg(value_parser = clap::value_parser!(u64).range(1_000..=10_000_000))]
    operations: u64,
    /// Print one JSON object a line for each platform and network
    #[arg(long)]
    json: bool,
}

/// Parses, for clap, the name of a system.
fn system(kind: &str) -> Result<&'static str, String> {
    predict::system(kind).map(|system| system.kind)
}

/// Default number of records of a transaction, as in `bench txn`.
const KEYS: u64 = 2;
/// Default size of a value in bytes, as in the figures of the PRISM paper.
const VALUE_LEN: usize = 512;
/// Maximum size of a value in bytes. With larger values, the simulated store would exceed the memory of most machines.
const VALUE_LEN_MAX: usize = 32 << 10;

impl WhatIf {
    pub(super) fn run(self) -> Done {
        let has_transactions = predict::system(self.system).map_err(Failure::Error)?.family == Family::Txn;
        let keys = match (has_transactions, self.keys) {
            (true, keys) => keys.unwrap_or(KEYS),
            (false, None) => 1,
            (false, Some(keys)) => {
                return Err(Failure::Error(format!(
                    "--keys {keys} is the number of records of a transaction, and {} has no transactions: omit --keys",
                    self.system
                )));
            }
        };
        let (reads, value_len, lengths) = mix(&self.workload)?;
        let question = Question {
            system: self.system,
            reads,
            keys: keys as usize,
            value_len,
            lengths,
            link_gbit: self.link,
            operations: self.operations,
        };
        let answers = whatif::ask(&question).map_err(Failure::Error)?;
        if !self.json {
            print_line!(
                "{}: {}{:.0} % reads, values of {}{value_len} bytes, a link of {} Gb/s",
                self.system,
                if has_transactions { format!("transactions of {keys} keys, ") } else { String::new() },
                100.0 * reads,
                if lengths == Lengths::Constant { "" } else { "up to " },
                self.link
            );
            print_line!("{}", whatif::table(&answers).trim_end());
            return Ok(());
        }
        for answer in answers {
            print_line!("{}", serde_json::to_string(&answer)?);
        }
        Ok(())
    }
}

/// Returns a workload's share of reads (0 to 1), its bytes per value, and the distribution of the lengths of values.
fn mix(workload: &str) -> Result<(f64, usize, Lengths), Failure> {
    if workload.contains('=') {
        let (reads, value_len) = terms(workload).map_err(Failure::Error)?;
        return Ok((reads, value_len, Lengths::Constant));
    }
    let workload = Workload::resolve(workload)?;
    let share = |operation| workload.mix.share(operation);
    let (reads, updates) = (share(Operation::Read), share(Operation::Update));
    if (reads + updates - 1.0).abs() > 1e-9 {
        return Err(Failure::Error(format!(
            "workload {} has operations besides read and update, which the model does not cover: give the share of \
             reads instead, for example --workload reads=0.95,value=512",
            workload.name
        )));
    }
    warn_of_unused(&workload);
    let value_len = match workload.chosen.value_size {
        None => VALUE_LEN,
        Some(bytes) => usize::try_from(bytes).ok().filter(|&bytes| bytes <= VALUE_LEN_MAX).ok_or_else(|| {
            Failure::Error(format!(
                "workload {} has values of {bytes} bytes, but the model covers at most {VALUE_LEN_MAX}: give a smaller \
                 value, for example --workload reads=0.95,value=512",
                workload.name
            ))
        })?,
    };
    Ok((reads, value_len, workload.lengths))
}

fn terms(text: &str) -> Result<(f64, usize), String> {
    let (mut reads, mut value_len) = (1.0, VALUE_LEN);
    for term in text.split(',') {
        match term.split_once('=') {
            Some(("reads", share)) => {
                let share = share.parse().ok().filter(|share| (0.0..=1.0).contains(share)).map(f64::abs);
                reads = share.ok_or_else(|| format!("'{term}' is not a share: give 0 to 1"))?;
            }
            Some(("value", bytes)) => {
                let bytes = bytes.parse().ok().filter(|bytes| (1..=VALUE_LEN_MAX).contains(bytes));
                value_len = bytes.ok_or_else(|| {
                    format!("'{term}' is not a length of a value: give 1 to {VALUE_LEN_MAX}")
                })?;
            }
            _ => return Err(format!("unknown term '{term}': write it like reads=0.95,value=512")),
        }
    }
    Ok((reads, value_len))
}
