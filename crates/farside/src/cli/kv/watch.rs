//! `kv stat --watch`: samples a node's counters and a store's statistics at an interval.
//!
//! - Rates are differences of the node's counters, which cover all clients and all stores. The probe's own requests are
//!   subtracted.
//! - The memory shown is that of the store.
//! - Latency is measured by a *probe*: GETs of an absent key by this process.
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
    pub(super) info: NodeInfo,
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
    while count.is_none_or(|count| shown < count) {
        next = (next + every).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let sample = watch.sample()?;
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

/// A session with the node that is sampled.
struct Watch {
    endpoint: Rc<Endpoint>,
    kv: AnyKv<Rc<Endpoint>>,
    store: String,
    began: Instant,
    sampled_at: Instant,
    info: NodeInfo,
    /// Traffic of this session itself when `info` was requested.
    own: Traffic,
    stat: StoreStat,
    /// Earliest time of the next request for the store's statistics.
    stat_next: Instant,
}

impl Watch {
    fn start(pool: &Pool, store: &str) -> Result<Watch, Failure> {
        let endpoint = Rc::new(pool.endpoint_here()?);
        let kv = block_on(
            &endpoint,
            AnyKv::open(Rc::clone(&endpoint), endpoint.nodes(), store, &Options::default()),
        )
        .map_err(|error| not_opened(pool, store, error))?;
        let now = Instant::now();
        let mut watch = Watch {
            endpoint,
            kv,
            store: store.to_owned(),
            began: now,
            sampled_at: now,
            info: NodeInfo::default(),
            own: Traffic::default(),
            stat: StoreStat::default(),
            stat_next: now,
        };
        watch.sample()?;
        watch.began = watch.sampled_at;
        Ok(watch)
    }

    /// Takes a sample of the activity since the previous one.
    fn sample(&mut self) -> Result<Sample, Failure> {
        let probe = self.probe();
        if self.stat_next <= Instant::now() {
            let requested_at = Instant::now();
            let Answer::StoreStat(stat) = self.ask(&Ask::StoreStat { name: self.store.clone() })? else {
                return Err(misunderstood());
            };
            self.stat = stat;
            self.stat_next = Instant::now() + 9 * requested_at.elapsed();
        }
        let own = Traffic::from(self.endpoint.counters());
        let Answer::NodeInfo(info) = self.ask(&Ask::NodeInfo)? else { return Err(misunderstood()) };
        let now = Instant::now();
        let less = |traffic: Traffic, own: Traffic| Traffic {
            chains: traffic.chains.saturating_sub(own.chains),
            ops: traffic.ops.saturating_sub(own.ops),
            atomics: traffic.atomics.saturating_sub(own.atomics),
            request_bytes: traffic.request_bytes.saturating_sub(own.request_bytes),
            reply_bytes: traffic.reply_bytes.saturating_sub(own.reply_bytes),
            not_ready: traffic.not_ready.saturating_sub(own.not_ready),
            refused: traffic.refused.saturating_sub(own.refused),
            retired_buffers: traffic.retired_buffers.saturating_sub(own.retired_buffers),
        };
        let both = info.traffic.zip(self.info.traffic);
        let sample = Sample {
            since: now - self.began,
            lasted: now - self.sampled_at,
            stat: self.stat.clone(),
            traffic: both.map(|(after, before)| less(less(after, before), less(own, self.own))),
            reclaimed: info.reclaimed_buffers.saturating_sub(self.info.reclaimed_buffers),
            lost: info.scanned_buffers.saturating_sub(self.info.scanned_buffers),
            refusals: refusals(&info),
            probe,
            info: NodeInfo { sessions: info.sessions.saturating_sub(1), ..info.clone() },
        };
        (self.info, self.own, self.sampled_at) = (info, own, now);
        Ok(sample)
    }

    fn probe(&mut self) -> Result<(Duration, Duration), String> {
        let mut took = Vec::with_capacity(PROBES);
        for _ in 0..PROBES {
            let since = Instant::now();
            let got = block_on(&self.endpoint, self.kv.get(PROBE_KEY)).map(drop);
            got.map_err(|error| error.to_string())?;
            took.push(since.elapsed());
        }
        took.sort_unstable();
        Ok((took[PROBES / 2], took[PROBES - 1]))
    }

    fn ask(&self, ask: &Ask) -> Result<Answer, Failure> {
        self.endpoint.set_call_timeout(ask.patience());
        let request = serde_json::to_vec(ask).expect("plain data");
        let mut answer = Vec::new();
        let call = self.endpoint.call(NodeId(0), ServiceId::NODE, &request, &mut answer);
        block_on(&self.endpoint, call).map_err(|error: FabricError| Failure::Error(error.to_string()))?;
        serde_json::from_slice(&answer).map_err(|_| misunderstood())
    }
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
