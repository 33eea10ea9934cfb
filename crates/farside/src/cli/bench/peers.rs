//! `bench txn --peers`: processes that each run a memory node and clients, as FaSST's machines do.
//!
//! A *peer* is a process of this command. It lends memory to all peers, and its clients reach their own memory without
//! a packet. The first process starts the peers, creates and loads a store over all of them, and has them measure at
//! the same time. It talks to a peer by lines of JSON:
//!
//! ```text
//! peer:   "udp://127.0.0.1:40001"                               its node serves at this url
//! first:  {"urls": ["udp://...", "udp://..."], "store": "..."}  the store is loaded: open it
//! peer:   "ready"
//! first:  "go"
//! peer:   the report of its clients
//! ```
//!
//! Invariant: a peer's node serves until the first process has the reports of all peers, and no longer than that
//! process lives.

use super::session::{Audited, Measured, Phases, SessionConfig, Transactions, check_memory_of, memory_for};
use super::{ExistingNode, FabricArg, check, nothing_done};
use crate::cli::child::Server;
use crate::cli::node::die_with_parent;
use crate::cli::{Done, Failure};
use farside::Pool;
use farside::parts::join_urls;
use farside_bench::report::{KindReport, YcsbReport, aborts_of_all, mix_table};
use farside_node::host::Listen;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::json;
use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, SocketAddr};
use std::process::{ChildStdin, ChildStdout, Command, Stdio};
use std::time::Duration;

/// What a peer is told once the store is loaded.
#[derive(Serialize, Deserialize)]
struct Opening {
    /// Urls of all peers' nodes.
    urls: Vec<String>,
    store: String,
}

/// A peer, as the first process sees it.
struct Peer {
    // Declared first: a peer whose input ends ends as well.
    input: ChildStdin,
    output: BufReader<ChildStdout>,
    _server: Server,
}

impl Peer {
    /// Starts the peer with this number, with this command's own arguments.
    fn start(number: u32) -> Result<Peer, Failure> {
        let mut command = Command::new(std::env::current_exe()?);
        command.args(std::env::args_os().skip(1)).args(["--as-peer", &number.to_string()]);
        let mut server = Server::start(command.stdin(Stdio::piped()).stdout(Stdio::piped()))?;
        let input = server.stdin().take().expect("it is piped");
        let output = BufReader::new(server.stdout().take().expect("it is piped"));
        Ok(Peer { input, output, _server: server })
    }

    fn tell(&mut self, what: &impl Serialize) -> Done {
        writeln!(self.input, "{}", serde_json::to_string(what)?).map_err(|_| ended())
    }

    fn hear<T: DeserializeOwned>(&mut self) -> Result<T, Failure> {
        hear(&mut self.output)?.ok_or_else(ended)
    }
}

fn ended() -> Failure {
    Failure::Error("a peer has ended: its output above has the reason".into())
}

/// Reads a line; `None` at the end of the input.
fn hear<T: DeserializeOwned>(from: &mut impl BufRead) -> Result<Option<T>, Failure> {
    let mut line = String::new();
    from.read_line(&mut line)?;
    if line.is_empty() { Ok(None) } else { Ok(Some(serde_json::from_str(&line)?)) }
}

/// Starts the peers, has them measure, and prints what they have done together.
pub(super) fn run<W: Audited>(count: u32, config: SessionConfig, is_json: bool) -> Done {
    check_memory_of(count, &config)?;
    let mut peers = (0..count).map(Peer::start).collect::<Result<Vec<Peer>, Failure>>()?;
    let urls = peers.iter_mut().map(Peer::hear).collect::<Result<Vec<String>, Failure>>()?;
    let (system, tasks, threads) = (config.system.kind, config.tasks, config.threads);
    let existing =
        ExistingNode { pool: Some(join_urls(urls.iter().map(|url| &**url))), ..config.existing.clone() };
    let loaded = Measured::<Transactions<W>>::start(SessionConfig { existing, ..config })?;
    let opening = Opening { urls, store: loaded.store().to_owned() };
    peers.iter_mut().try_for_each(|peer| peer.tell(&opening))?;
    peers.iter_mut().try_for_each(|peer| peer.hear::<String>().map(drop))?;
    note!("warming up, then measuring with {count} peers ...");
    peers.iter_mut().try_for_each(|peer| peer.tell(&"go"))?;
    let reports = peers.iter_mut().map(Peer::hear).collect::<Result<Vec<YcsbReport>, Failure>>()?;
    drop(loaded);
    let total = Total::of(&reports)?;
    let Total { ops_per_s: rate, abort_rate, cpu_us, errors, violations, mix } = &total;
    if is_json {
        let object = json!({
            "system": system, "peers": count, "threads": threads, "tasks": tasks, "ops_per_s": rate,
            "abort_rate": abort_rate, "cpu_us_per_transaction": cpu_us, "errors": errors, "violations": violations,
            "mix": mix, "reports": reports,
        });
        print_line!("{object}");
    } else {
        print_line!("{:<8}{:>16}{:>12}{:>12}{:>10}", "", "transactions/s", "p50 us", "p99 us", "aborts");
        for (number, report) in reports.iter().enumerate() {
            let (latency, aborts) = (&report.latency_us, 100.0 * report.abort_rate.unwrap_or_default());
            let name = format!("peer {number}");
            print_line!(
                "{name:<8}{:>16.0}{:>12.1}{:>12.1}{aborts:>8.2} %",
                report.ops_per_s,
                latency.p50,
                latency.p99
            );
        }
        print_line!("{:<8}{rate:>16.0}; {cpu_us:.1} us of CPU time for a transaction, on all peers", "all");
        if !mix.is_empty() {
            print_line!("{}", mix_table(mix).to_string().trim_end());
        }
    }
    check(*errors, *violations)
}

/// The totals of all peers.
struct Total {
    ops_per_s: f64,
    /// Fraction of the attempts that met another transaction.
    abort_rate: f64,
    /// CPU time of all peers for a transaction, in microseconds.
    cpu_us: f64,
    errors: u64,
    violations: u64,
    mix: BTreeMap<String, KindReport>,
}

impl Total {
    /// # Errors
    /// The peers have done nothing.
    fn of(reports: &[YcsbReport]) -> Result<Total, Failure> {
        let sum = |of: &dyn Fn(&YcsbReport) -> f64| -> f64 { reports.iter().map(of).sum() };
        let count = |of: fn(&YcsbReport) -> u64| -> u64 { reports.iter().map(of).sum() };
        let (ops_per_s, errors) = (sum(&|report| report.ops_per_s), count(|report| report.errors));
        if ops_per_s == 0.0 && errors == 0 {
            return Err(nothing_done());
        }
        let attempts = reports.iter().map(|report| (report.ops_per_s, report.abort_rate.unwrap_or_default()));
        let mut mix: BTreeMap<String, KindReport> = BTreeMap::new();
        for (name, kind) in reports.iter().flat_map(|report| &report.mix) {
            match mix.entry(name.clone()) {
                Entry::Vacant(entry) => _ = entry.insert(*kind),
                Entry::Occupied(mut entry) => entry.get_mut().add(kind),
            }
        }
        Ok(Total {
            ops_per_s,
            abort_rate: aborts_of_all(attempts),
            // Node and clients of a peer are one process.
            cpu_us: sum(&|report| report.cpu_s_per_mop.client * report.ops_per_s) / ops_per_s,
            errors,
            violations: count(|report| report.violations),
            mix,
        })
    }
}

/// Serves memory to all peers, and measures when the first process says so. This process is peer `number` of `count`.
/// `complete` adds to its report.
pub(super) fn serve<W: Audited>(
    (number, count): (u32, u32),
    config: SessionConfig,
    complete: impl FnOnce(&Measured<Transactions<W>>, &mut YcsbReport),
) -> Done {
    die_with_parent()?;
    let any_port = SocketAddr::from((Ipv4Addr::LOCALHOST, 0));
    let listen = match config.fabric {
        Some(FabricArg::Tcp) => Listen::Tcp(any_port),
        _ => Listen::Udp(any_port),
    };
    let (own, urls) = Pool::serve_here_at(memory_for(&config)?, vec![listen])?;
    let duration = Duration::from_secs_f64(config.seconds);
    let own_url = urls.into_iter().next().expect("the node listens at one address");
    print_line!("{}", json!(own_url));
    let mut first = BufReader::new(std::io::stdin());
    let Some(Opening { urls, store }) = hear(&mut first)? else { return Ok(()) };
    let pools = urls.iter().map(|url| match *url == own_url {
        true => Ok(own.clone()),
        false => farside::connect(url),
    });
    let pool = Pool::joined(&pools.collect::<Result<Vec<Pool>, _>>()?);
    let config = SessionConfig {
        phases: Phases::Run(store),
        quiet: true,
        target: config.target.map(|target| target / f64::from(count)),
        // Each peer draws transactions and pauses of its own.
        seed: config.seed ^ u64::from(number + 1) << 48,
        ..config
    };
    let session = Measured::<Transactions<W>>::within(&pool, config)?;
    print_line!("{}", json!("ready"));
    let Some(_go) = hear::<String>(&mut first)? else { return Ok(()) };
    let mut report = session.measure(duration)?;
    report.abort_rate = Some(session.abort_rate());
    report.cpu_s_per_mop.node = None; // This process is a node, too.
    complete(&session, &mut report);
    print_line!("{}", serde_json::to_string(&report)?);
    // Other peers may not be done yet.
    hear::<String>(&mut first).map(drop)
}
