//! `kv stat --watch`: asks a node again and again what was done meanwhile.
//!
//! Rates are differences of the node's counters, which are all clients' and all stores'; memory is the store's. Latency
//! is that of a *probe*: GETs of a key that nobody has put, by this process, which counts them out of the rates.
//! Invariant: whoever looks often does not keep the node busy: a store's statistics, for which it looks at every
//! buffer, are asked for so that this takes a tenth of the time at most.

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

/// For clap: how long to wait between two looks.
pub(super) fn interval(text: &str) -> Result<Duration, String> {
    let within = Duration::from_millis(100)..=Duration::from_secs(3600);
    duration(text).ok().filter(|every| within.contains(every)).ok_or_else(|| {
        format!("'{text}' is no time to wait between two looks: give 100ms to 1h; a number alone is seconds")
    })
}

/// What was done between two looks.
#[derive(Clone, Debug)]
pub(super) struct Tick {
    /// Since the first look.
    pub(super) since: Duration,
    /// Since the one before.
    pub(super) lasted: Duration,
    pub(super) info: NodeInfo,
    pub(super) stat: StoreStat,
    /// What was run meanwhile, without the probe's; nothing where the node does not tell.
    pub(super) traffic: Option<Traffic>,
    pub(super) reclaimed: u64,
    pub(super) lost: u64,
    pub(super) refusals: u64,
    /// Median and greatest time of a probe's GET, or why there is none.
    pub(super) probe: Result<(Duration, Duration), String>,
}

/// Looks every so often, for ever or `count` times.
pub(super) fn run(pool: Pool, store: String, every: Duration, count: Option<u64>, json: bool) -> Done {
    let first = Watch::start(&pool, &store)?;
    let mut view = View::new(pool.url(), &store);
    if json || !io::stdin().is_terminal() || !io::stdout().is_terminal() {
        return by_lines(first, &view, every, count, json);
    }
    let _screen = Screen::enter()?;
    let show = |lines: Vec<String>| written(Screen::show(&lines));
    let mut watch = Some(first);
    let (mut next, mut told) = (Instant::now() + every, 0);
    show(view.waiting("looking ..."))?;
    while count.is_none_or(|count| told < count) {
        if Screen::is_ended_before(next)? {
            return Ok(());
        }
        next = (next + every).max(Instant::now());
        let looked = match &mut watch {
            Some(watch) => watch.look().map(Some),
            // It may be another node by now, whose counters say nothing of the one before.
            None => Watch::start(&pool, &store).map(|again| {
                watch = Some(again);
                None
            }),
        };
        match looked {
            Ok(Some(tick)) => {
                view.push(tick);
                told += 1;
                show(view.lines(Screen::size().0))?;
            }
            Ok(None) => show(view.waiting("looking ..."))?,
            Err(Failure::Told(reason)) => {
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
    let mut told = 0;
    while count.is_none_or(|count| told < count) {
        next = (next + every).max(Instant::now());
        std::thread::sleep(next.saturating_duration_since(Instant::now()));
        let tick = watch.look()?;
        if json {
            tell!("{}", view::object(&tick));
        } else {
            if told % HEADING_EVERY == 0 {
                tell!("{}", view.heading());
            }
            tell!("{}", view::line(&tick));
        }
        told += 1;
    }
    Ok(())
}

/// Lines between two headings: a terminal's page.
const HEADING_EVERY: u64 = 20;

/// GETs of a probe.
const PROBES: usize = 16;
/// Nobody's key.
const PROBE_KEY: &[u8] = b"\0farside stat --watch";

/// A session with a node that is watched.
struct Watch {
    endpoint: Rc<Endpoint>,
    kv: AnyKv<Rc<Endpoint>>,
    store: String,
    began: Instant,
    looked: Instant,
    info: NodeInfo,
    /// What this session had counted when the node told.
    own: Traffic,
    stat: StoreStat,
    /// When the store may be asked about again.
    stat_next: Instant,
}

impl Watch {
    fn start(pool: &Pool, store: &str) -> Result<Watch, Failure> {
        let endpoint = Rc::new(pool.endpoint_here()?);
        let kv =
            block_on(&endpoint, AnyKv::open(Rc::clone(&endpoint), NodeId(0), store, &Options::default()))
                .map_err(|error| not_opened(pool, store, error))?;
        let now = Instant::now();
        let mut watch = Watch {
            endpoint,
            kv,
            store: store.to_owned(),
            began: now,
            looked: now,
            info: NodeInfo::default(),
            own: Traffic::default(),
            stat: StoreStat::default(),
            stat_next: now,
        };
        watch.look()?;
        watch.began = watch.looked;
        Ok(watch)
    }

    /// What was done since the last look.
    fn look(&mut self) -> Result<Tick, Failure> {
        let probe = self.probe();
        if self.stat_next <= Instant::now() {
            let asked = Instant::now();
            let Answer::StoreStat(stat) = self.ask(&Ask::StoreStat { name: self.store.clone() })? else {
                return Err(misunderstood());
            };
            self.stat = stat;
            self.stat_next = Instant::now() + 9 * asked.elapsed();
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
        let tick = Tick {
            since: now - self.began,
            lasted: now - self.looked,
            stat: self.stat.clone(),
            traffic: both.map(|(after, before)| less(less(after, before), less(own, self.own))),
            reclaimed: info.reclaimed_buffers.saturating_sub(self.info.reclaimed_buffers),
            lost: info.scanned_buffers.saturating_sub(self.info.scanned_buffers),
            refusals: refusals(&info),
            probe,
            info: NodeInfo { sessions: info.sessions.saturating_sub(1), ..info.clone() },
        };
        (self.info, self.own, self.looked) = (info, own, now);
        Ok(tick)
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
        self.endpoint.set_patience(ask.patience());
        let request = serde_json::to_vec(ask).expect("plain data");
        let mut answer = Vec::new();
        let call = self.endpoint.call(NodeId(0), ServiceId::NODE, &request, &mut answer);
        block_on(&self.endpoint, call).map_err(|error: FabricError| Failure::Told(error.to_string()))?;
        serde_json::from_slice(&answer).map_err(|_| misunderstood())
    }
}

fn misunderstood() -> Failure {
    Failure::Told("the node's answer is not understood: use the same release on both sides".into())
}

/// All that its engines have refused.
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
