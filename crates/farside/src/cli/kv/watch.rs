//! `kv stat --watch`: samples a node's counters and a store's statistics at an interval.
//!
//! - Rates are differences of a node's counters, which cover all clients and all stores. The probe's own requests are
//!   subtracted. The rates of several nodes are added up.
//! - The memory shown is that of the store, at all of its nodes.
//! - Latency is measured by a *probe*: GETs of absent keys by this process.
//!
//! A node of several that does not answer counts for nothing until it answers twice: its rates are unknown, and the
//! memory of its part is that of its last answer.
//!
//! Invariant: sampling does not keep the node busy. To compute a store's statistics, the node visits every buffer of
//! the store. So this program requests statistics for at most a tenth of the time.

use super::not_opened;
use super::view::{self, View};
use crate::cli::terminal::Screen;
use crate::cli::{Done, Failure, duration, written};
use farside::parts::{AnyKv, Endpoint};
use farside::{NodeInfo, Pool, StoreStat};
use farside_fabrics::executor::block_on;
use farside_remote::control::{Answer, Ask, Traffic};
use farside_remote::fabric::ServiceId;
use farside_remote::{Fabric, FabricError, NodeId};
use farside_systems::kv::Kv;
use farside_systems::members;
use farside_systems::store::{Member, StoreError};
use farside_systems::system::Options;
use std::io::{self, IsTerminal};
use std::rc::Rc;
use std::time::{Duration, Instant};

/// Parses, for clap, the interval between two samples.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let within = Duration::from_millis(100)..=Duration::from_secs(3600);
    duration(text).ok().filter(|every| within.contains(every)).ok_or_else(|| {
        format!(
            "'{text}' is not an interval between two samples: give 100ms to 1h; a number alone is seconds"
        )
    })
}

/// A sample: the activity since the previous sample.
#[derive(Clone, Debug)]
pub(super) struct Sample {
    /// Time since the first sample.
    pub(super) since: Duration,
    /// Time since the previous sample.
    pub(super) lasted: Duration,
    /// Process of the node; 0 if it is unknown, or if there are several nodes.
    pub(super) pid: u32,
    /// Number of sessions at the nodes, without this process's own.
    pub(super) sessions: u64,
    /// Number of nodes that hold the store.
    pub(super) nodes: usize,
    /// Nodes that did not answer, with the reason.
    pub(super) silent: Vec<(NodeId, String)>,
    pub(super) stat: StoreStat,
    /// Traffic of all clients since the previous sample, without this session's own. `None` if the node does not report
    /// traffic.
    pub(super) traffic: Option<Traffic>,
    pub(super) reclaimed: u64,
    pub(super) lost: u64,
    pub(super) refusals: u64,
    /// Median and maximum latency of the probe's GETs, in that order, or the probe's error.
    pub(super) probe: Result<(Duration, Duration), String>,
}

/// Samples the node at the interval `every`, `count` times if given, and displays the samples.
pub(super) fn run(pool: Pool, store: String, every: Duration, count: Option<u64>, json: bool) -> Done {
    let first = Watch::start(&pool, &store)?;
    let mut view = View::new(pool.url(), &store);
    if json || !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return by_lines(first, &view, every, count, json);
    }
    let _screen = Screen::enter()?;
    let show = |lines: Vec<String>| written(Screen::show(&lines));
    let mut watch = Some(first);
    let (mut next, mut shown) = (Instant::now() + every, 0);
    show(view.waiting("sampling ..."))?;
    while count.is_none_or(|count| shown < count) {
        if Screen::is_ended_before(next)? {
            return Ok(());
        }
        next = (next + every).max(Instant::now());
        let result = match &mut watch {
            Some(watch) => watch.sample().map(Some),
            // After a failure, another node may respond, whose counters cannot be compared with the former ones.
            None => Watch::start(&pool, &store).map(|again| {
                watch = Some(again);
                None
            }),
        };
        match result {
            Ok(Some(sample)) => {
                view.push(sample);
                shown += 1;
                show(view.lines(Screen::size().0))?;
            }
            Ok(None) => show(view.waiting("sampling ..."))?,
            Err(Failure::Error(reason)) => {
                watch = None;
                show(view.waiting(&reason))?;
            }
            Err(other) => return Err(other),
        }
    }
    Ok(())
}

fn by_lines(mut watch: Watch, view: &View, every: Duration, count: Option<u64>, json: bool) -> Done {
    let mut next = Instant::now();
    let mut shown = 0;
    let mut silent = Vec::new();
    while count.is_none_or(|count| shown < count) {
        next = (next + every).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let sample = watch.sample()?;
        let nodes: Vec<NodeId> = sample.silent.iter().map(|(node, _)| *node).collect();
        if nodes != silent {
            sample.silent.iter().for_each(|(_, reason)| note!("farside: {reason}"));
            silent = nodes;
        }
        if json {
            print_line!("{}", view::object(&sample));
        } else {
            if shown % HEADING_EVERY == 0 {
                print_line!("{}", view.heading());
            }
            print_line!("{}", view::line(&sample));
        }
        shown += 1;
    }
    Ok(())
}

/// Number of lines between two headings: about one page of a terminal.
const HEADING_EVERY: u64 = 20;

/// Number of GETs in a probe.
const PROBES: usize = 16;
/// Key of the probe, which no client is expected to store.
const PROBE_KEY: &[u8] = b"\0farside stat --watch";

/// Sessions with the nodes that are sampled.
struct Watch {
    endpoint: Rc<Endpoint>,
    kv: AnyKv<Rc<Endpoint>>,
    store: String,
    began: Instant,
    sampled_at: Instant,
    nodes: Vec<Sampled>,
    /// Traffic of this process itself when the nodes were asked.
    own: Traffic,
    /// Earliest time of the next request for the store's statistics.
    stat_next: Instant,
}

/// A node that holds the store or a part of it.
struct Sampled {
    node: NodeId,
    /// Last answer; `None` if the node did not answer the last request.
    info: Option<NodeInfo>,
    stat: Option<StoreStat>,
}

impl Watch {
    fn start(pool: &Pool, store: &str) -> Result<Watch, Failure> {
        let endpoint = Rc::new(pool.endpoint_over_all()?);
        let opening = async {
            let members = members::open(&*endpoint, endpoint.nodes(), store).await?;
            let options = Options::default();
            let kv = AnyKv::of(Rc::clone(&endpoint), endpoint.nodes(), &members, &options).await?;
            Ok::<_, StoreError>((members, kv))
        };
        let (members, kv) = block_on(&endpoint, opening).map_err(|error| not_opened(pool, store, error))?;
        let sampled = |member: &Member| Sampled { node: member.node, info: None, stat: None };
        let now = Instant::now();
        let mut watch = Watch {
            nodes: members.list().iter().map(sampled).collect(),
            endpoint,
            kv,
            store: store.to_owned(),
            began: now,
            sampled_at: now,
            own: Traffic::default(),
            stat_next: now,
        };
        watch.sample()?;
        watch.began = watch.sampled_at;
        Ok(watch)
    }

    /// Takes a sample of the activity since the previous one.
    ///
    /// # Errors
    /// No node has answered.
    fn sample(&mut self) -> Result<Sample, Failure> {
        let probe = self.probe();
        let own = Traffic::from(self.endpoint.counters());
        let mut sample = Sample {
            since: Duration::ZERO,
            lasted: Duration::ZERO,
            pid: 0,
            sessions: 0,
            nodes: self.nodes.len(),
            silent: Vec::new(),
            stat: StoreStat::default(),
            traffic: None,
            reclaimed: 0,
            lost: 0,
            refusals: 0,
            probe,
        };
        let requested_at = Instant::now();
        let is_stat_due = self.stat_next <= requested_at;
        for index in 0..self.nodes.len() {
            let node = self.nodes[index].node;
            let asked = self.about(node, is_stat_due || self.nodes[index].stat.is_none());
            let sampled = &mut self.nodes[index];
            match asked {
                Ok((info, stat)) => {
                    sample.add(sampled.info.as_ref(), &info);
                    sampled.info = Some(info);
                    sampled.stat = stat.or(sampled.stat.take());
                }
                Err(Failure::Error(reason)) => {
                    sampled.info = None;
                    sample.silent.push((node, reason));
                }
                Err(other) => return Err(other),
            }
            if let Some(stat) = &sampled.stat {
                sample.stat.add(stat);
            }
        }
        if let [.., (_, reason)] = &sample.silent[..]
            && sample.silent.len() == sample.nodes
        {
            return Err(Failure::Error(reason.clone()));
        }
        let now = Instant::now();
        if is_stat_due {
            self.stat_next = now + 9 * requested_at.elapsed();
        }
        sample.traffic = sample.traffic.map(|traffic| less(traffic, less(own, self.own)));
        (sample.since, sample.lasted) = (now - self.began, now - self.sampled_at);
        (self.own, self.sampled_at) = (own, now);
        Ok(sample)
    }

    /// Asks a node for its state, and if `with_stat` for the statistics of its part of the store.
    fn about(&self, node: NodeId, with_stat: bool) -> Result<(NodeInfo, Option<StoreStat>), Failure> {
        let Answer::NodeInfo(info) = self.ask(node, &Ask::NodeInfo)? else { return Err(misunderstood()) };
        if !with_stat {
            return Ok((info, None));
        }
        match self.ask(node, &Ask::StoreStat { name: self.store.clone() })? {
            Answer::StoreStat(stat) => Ok((info, Some(stat))),
            _ => Err(misunderstood()),
        }
    }

    fn probe(&mut self) -> Result<(Duration, Duration), String> {
        let mut took = Vec::with_capacity(PROBES);
        for probe in 0..PROBES {
            // Other keys, so that the probe reaches several nodes.
            let key = [PROBE_KEY, &[probe as u8]].concat();
            let since = Instant::now();
            let got = block_on(&self.endpoint, self.kv.get(&key)).map(drop);
            got.map_err(|error| error.to_string())?;
            took.push(since.elapsed());
        }
        took.sort_unstable();
        Ok((took[PROBES / 2], took[PROBES - 1]))
    }

    fn ask(&self, node: NodeId, ask: &Ask) -> Result<Answer, Failure> {
        self.endpoint.set_call_timeout(ask.patience());
        let request = serde_json::to_vec(ask).expect("plain data");
        let mut answer = Vec::new();
        let call = self.endpoint.call(node, ServiceId::NODE, &request, &mut answer);
        block_on(&self.endpoint, call).map_err(|error: FabricError| Failure::Error(error.to_string()))?;
        serde_json::from_slice(&answer).map_err(|_| misunderstood())
    }
}

impl Sample {
    /// Adds what a node has done between two answers.
    fn add(&mut self, before: Option<&NodeInfo>, now: &NodeInfo) {
        self.sessions += now.sessions.saturating_sub(1);
        self.refusals += refusals(now);
        self.pid = if self.nodes == 1 { now.pid } else { 0 };
        let Some(before) = before else { return };
        self.reclaimed += now.reclaimed_buffers.saturating_sub(before.reclaimed_buffers);
        self.lost += now.scanned_buffers.saturating_sub(before.scanned_buffers);
        if let Some((now, before)) = now.traffic.zip(before.traffic) {
            self.traffic = Some(sum(self.traffic.unwrap_or_default(), less(now, before)));
        }
    }
}

/// Applies `op` to each counter of two.
fn each(one: Traffic, other: Traffic, op: fn(u64, u64) -> u64) -> Traffic {
    Traffic {
        chains: op(one.chains, other.chains),
        ops: op(one.ops, other.ops),
        atomics: op(one.atomics, other.atomics),
        request_bytes: op(one.request_bytes, other.request_bytes),
        reply_bytes: op(one.reply_bytes, other.reply_bytes),
        not_ready: op(one.not_ready, other.not_ready),
        refused: op(one.refused, other.refused),
        retired_buffers: op(one.retired_buffers, other.retired_buffers),
    }
}

fn sum(one: Traffic, other: Traffic) -> Traffic {
    each(one, other, u64::saturating_add)
}

fn less(one: Traffic, other: Traffic) -> Traffic {
    each(one, other, u64::saturating_sub)
}

fn misunderstood() -> Failure {
    Failure::Error("could not parse the node's response: use the same release on both sides".into())
}

/// Total number of refusals by the node's engines.
fn refusals(info: &NodeInfo) -> u64 {
    let refused = info.refusals;
    refused.bad_tokens
        + refused.locked_out
        + refused.bad_secrets
        + refused.chains
        + refused.asks
        + refused.forged
        + refused.replayed
}
