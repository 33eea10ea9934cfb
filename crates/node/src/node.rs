//! The node: a state machine that accepts requests, makes steps, and returns responses.
//!
//! Invariant: one step changes the catalog for at most one job, and the job's response is available only when the whole
//! job is done.
//! Invariant: a job that waits for a client's turn to end does not delay other jobs.

mod jobs;
pub(crate) mod pairing;
mod questions;
mod rebuilding;
mod replacing;

use crate::catalog::Catalog;
use crate::epochs::Leased;
use crate::extents::Extents;
use crate::identity::{self, Bindings, FENCED_MAX, Fence, Sender};
use crate::log::pairing::{Paired, PairedState};
use crate::log::{LogOptions, StoreLog};
use crate::mutants;
use crate::rebuild::{self, Rebuild};
use crate::reclaim::Reclaim;
use crate::restart;
use crate::scan::Scan;
use crate::served::Served;
use crate::session::{Grace, Sessions};
use farside_remote::Memory;
use farside_remote::arena::Arena;
use farside_remote::arena::class::Class;
use farside_remote::arena::lists::Supply;
use farside_remote::arena::segment::Use;
use farside_remote::arena::session::{Counters, SessionId};
use farside_remote::arena::state::Stage;
use farside_remote::arena::{Geometry, SEGMENT_SIZE};
use farside_remote::control::{Accepted, Answer, Ask, MemberState, NodeInfo, Store, StoreStat};
use farside_remote::draws::Draws;
use farside_remote::leases::LeaseTable;
use farside_remote::service::{Kind, Plan, Work};
use jobs::{Job, Leaving, Origin};
use questions::Question;
use replacing::{Change, Revocation};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::sync::Arc;
use std::time::Duration;

/// Memory whose segments a node can also zero, which returns their pages to the system.
pub trait NodeMemory: Memory {
    /// Zeroes segment `index`, and returns its pages to the system if possible.
    fn discard(&self, index: u32) -> Result<(), Self::Wait>;
}

/// A source of random numbers.
pub type Seeds = Box<dyn FnMut() -> u64 + Send>;

fn seeds_of(mut draws: Draws) -> Seeds {
    Box::new(move || draws.next())
}

/// Number that identifies a request and its response.
pub type Ticket = u64;

/// Outcome of a step.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Progress {
    /// The step did something: call again.
    Made,
    /// There is nothing to do until a request arrives, a client retires buffers, or a session ends.
    Idle,
}

/// A memory node's state.
pub struct Node<M: NodeMemory> {
    extents: Extents,
    catalog: Catalog<M>,
    sessions: Sessions,
    /// Number of sessions that have ended since the node's process started.
    ended: u64,
    bindings: Bindings,
    /// Number of engines among the sessions.
    engines: u64,
    /// Ended sessions whose retired buffers are still being taken.
    closing: VecDeque<SessionId>,
    reclaim: Reclaim,
    /// Stores being created or dropped, fences and revocations. Each store has a region, so the number of regions
    /// bounds the number of stores' jobs. The number of fences and revocations is bounded together with that of other
    /// requests.
    jobs: VecDeque<(Ticket, Job<M>)>,
    /// Questions about members of stores that wait until the catalog's record shows what the node knows.
    questions: VecDeque<(Ticket, Question)>,
    /// Whether the catalog's last step has answered a question.
    has_answered: bool,
    /// Index of the current job, and the number of consecutive jobs that were found waiting.
    at_job: (usize, usize),
    /// Statistics requests in progress, each with the tickets that wait for its result.
    stat_requests: VecDeque<(StatRequest, Vec<Ticket>)>,
    /// Regions to be scanned, each with the tickets that wait for the scan. A scan after a client's death has no
    /// ticket.
    scans_due: VecDeque<(u32, Vec<Ticket>)>,
    scan: Option<(Scan, Vec<Ticket>)>,
    /// Regions to be checked for shortage of memory, each with the class to check next.
    relief: VecDeque<(u32, u8)>,
    /// Regions whose services have private state to recover, each with the next cursor.
    recoveries: VecDeque<(u32, u64)>,
    /// Regions whose services have background steps to make.
    ticks: VecDeque<u32>,
    /// Regions whose services have asked for a step at a time ([`Tick::At`](farside_remote::service::Tick::At)).
    timers: BTreeMap<u32, Duration>,
    /// Time by the node's monotonic clock; see [`Node::set_now`].
    now: Duration,
    /// Source of the seeds of services' background steps, and of the salts of logs.
    seeds: Seeds,
    /// Seed of the background step that was begun and may wait for memory.
    tick_seed: Option<u64>,
    /// Options of the logs of new stores, if their kinds have logs and the node has a place for them.
    log_options: Option<LogOptions>,
    /// Logs that have no writer yet.
    new_logs: Vec<Arc<StoreLog>>,
    /// The region whose table was checked last.
    watched: u32,
    /// Index of the part of the node that makes the next step, and the number of consecutive parts that had nothing to
    /// do.
    rotation: (usize, usize),
    answers: VecDeque<(Ticket, Result<Answer, String>)>,
    next_ticket: Ticket,
    info: NodeInfo,
    geometry: Geometry,
    /// Sequence number of the catalog record that was written last.
    catalog_sequence: u64,
    /// The sum of the counters of closed sessions.
    counted: Counters,
    /// Time by the host's real-time clock, in microseconds since the Unix epoch; see [`Node::set_wall`].
    wall: u64,
}

/// The node's view of the stores whose clients have epochs.
struct LeasedStores<'a, M: NodeMemory> {
    catalog: &'a Catalog<M>,
    jobs: &'a VecDeque<(Ticket, Job<M>)>,
}

impl<M: NodeMemory> Leased for LeasedStores<'_, M> {
    fn is_any(&self) -> bool {
        self.catalog.is_any_leased()
    }

    fn table(&self, region: u32) -> Option<LeaseTable> {
        self.catalog.by_region(region)?.served.leases()
    }

    fn is_fenced(&self, region: u32, nonce: u64) -> bool {
        let is_recorded = self.catalog.by_region(region).is_some_and(|entry| entry.fenced.contains(&nonce));
        let is_running = |job: &Job<M>| match job {
            Job::Fence(fence) => (fence.region, fence.nonce) == (region, nonce),
            _ => false,
        };
        is_recorded && !self.jobs.iter().any(|(_, job)| is_running(job))
    }
}

/// A traversal of a store's buffers, for the store's statistics.
struct StatRequest {
    name: String,
    /// The store's id, which distinguishes it from a later store of the same name.
    id: u64,
    /// Position of the next buffer: the index of its segment in the store's list, and its number in this segment.
    at: (usize, u32),
    stat: Box<StoreStat>,
}

/// Maximum number of outstanding requests about stores, which bounds the memory that they take.
const WAITING_MAX: usize = 4096;

impl<M: NodeMemory> Node<M> {
    /// Creates a node on fresh memory that supports these kinds of stores. `info` has the constant fields of
    /// [`Node::info`], which fills in the others.
    pub fn new(memory: &M, kinds: Vec<Box<dyn Kind<M>>>, info: NodeInfo) -> Node<M> {
        Node {
            extents: Extents::new(memory.geometry().segments()),
            catalog: Catalog::new(kinds),
            sessions: Sessions::new(1),
            ended: 0,
            bindings: Bindings::default(),
            engines: 0,
            closing: VecDeque::new(),
            reclaim: Reclaim::default(),
            jobs: VecDeque::new(),
            questions: VecDeque::new(),
            has_answered: false,
            at_job: (0, 0),
            stat_requests: VecDeque::new(),
            scans_due: VecDeque::new(),
            scan: None,
            relief: VecDeque::new(),
            recoveries: VecDeque::new(),
            ticks: VecDeque::new(),
            timers: BTreeMap::new(),
            now: Duration::ZERO,
            seeds: seeds_of(Draws(info.incarnation)),
            tick_seed: None,
            log_options: None,
            new_logs: Vec::new(),
            watched: 0,
            rotation: (0, 0),
            answers: VecDeque::new(),
            next_ticket: 1,
            info,
            geometry: memory.geometry(),
            catalog_sequence: 0,
            counted: Counters::default(),
            wall: 0,
        }
    }

    /// Creates a node on memory that another node served and that no process uses any more. The new node scans all
    /// stores for buffers that clients held. The caller goes on with [`Node::recover_step`].
    ///
    /// # Errors
    /// A store cannot be served by this release.
    pub fn restore(
        memory: &M,
        kinds: Vec<Box<dyn Kind<M>>>,
        info: NodeInfo,
    ) -> Result<Result<Node<M>, String>, M::Wait> {
        let restored = match restart::restore(memory, kinds)? {
            Ok(restored) => restored,
            Err(reason) => return Ok(Err(reason)),
        };
        let mut node = Node::new(memory, Vec::new(), info);
        node.extents = restored.extents;
        node.catalog = restored.catalog;
        node.catalog_sequence = restored.sequence;
        node.sessions = Sessions::new(restored.next_session);
        node.ended = 1; // All sessions of the old node have ended, of which each service is told.
        node.recoveries = node.catalog.iter().map(|entry| (entry.store.region, 0)).collect();
        node.scan_all();
        Ok(Ok(node))
    }

    /// Makes one step of the recovery of the services' private states from the memory that the node has taken over.
    /// Returns true once all are recovered. Before, the caller serves nothing and makes no other step.
    ///
    /// # Errors
    /// A store cannot be served.
    pub fn recover_step(&mut self, memory: &M) -> Result<Result<bool, String>, M::Wait> {
        let Some(&(region, cursor)) = self.recoveries.front() else { return Ok(Ok(true)) };
        if let Some(entry) = self.catalog.by_region(region) {
            let service =
                entry.served.try_exclusive().expect("nothing of the store runs before it is recovered");
            match service.recover(memory, cursor)? {
                Ok(None) => {}
                Ok(Some(next)) => {
                    drop(service);
                    self.recoveries[0].1 = next;
                    return Ok(Ok(false));
                }
                Err(reason) => {
                    let name = &entry.store.name;
                    return Ok(Err(format!("store '{name}' cannot be served: {reason}")));
                }
            }
        }
        self.recoveries.pop_front();
        Ok(Ok(self.recoveries.is_empty()))
    }

    /// Returns the open sessions.
    pub fn sessions(&self) -> &Sessions {
        &self.sessions
    }

    /// Returns the catalog of stores.
    pub fn catalog(&self) -> &Catalog<M> {
        &self.catalog
    }

    /// The service of the store of this region. The caller must be in a turn, or be the thread that makes the node's
    /// steps.
    pub fn served(&self, region: u32) -> Option<Arc<Served<M>>> {
        self.catalog.by_region(region).map(|entry| Arc::clone(&entry.served))
    }

    /// The node's current state, for an `Ask::NodeInfo`.
    pub fn info(&self) -> NodeInfo {
        NodeInfo {
            unassigned_bytes: u64::from(self.extents.free()) * SEGMENT_SIZE,
            sessions: self.sessions.len() as u64 - self.engines,
            reclaimed_buffers: self.reclaim.reclaimed,
            ..self.info.clone()
        }
    }

    /// The sum of the counters of all sessions, including closed sessions. Reads memory once per session.
    pub fn counters(&self, memory: &M) -> Result<Counters, M::Wait> {
        let mut sum = self.counted;
        for session in self.sessions.iter() {
            sum.add(&Arena::of(memory).counters(session.id.slot)?);
        }
        Ok(sum)
    }

    /// Opens a session for a process. Returns `None` if all slots are taken.
    pub fn open_session(
        &mut self,
        memory: &M,
        pid: u32,
        start_time: u64,
    ) -> Result<Option<SessionId>, M::Wait> {
        self.sessions.open(memory, pid, start_time)
    }

    /// Opens a session for an engine of this node, which announces its turns in the session's slot.
    pub fn open_engine(
        &mut self,
        memory: &M,
        pid: u32,
        start_time: u64,
    ) -> Result<Option<SessionId>, M::Wait> {
        let opened = self.sessions.open(memory, pid, start_time)?;
        self.engines += u64::from(opened.is_some());
        Ok(opened)
    }

    /// Opens a session whose chains an engine of this node will run. Returns the session's number, which the session's
    /// buffers record as their owner.
    pub fn open_remote(&mut self, memory: &M) -> Result<u32, M::Wait> {
        self.sessions.open_remote(memory)
    }

    /// Ends a remote session, which runs no more chains. Unless it ended cleanly, stores are scanned for its buffers.
    pub fn end_remote(&mut self, number: u32, is_clean: bool) {
        self.sessions.end_remote(number);
        self.ended += 1;
        if self.bindings.forget_session(number) || !is_clean {
            self.scan_all();
        }
    }

    /// Ends a session, whose owner runs no more chains. Unless the session ended cleanly, stores are scanned for its
    /// buffers. Does nothing if the session has ended already.
    pub fn end_session(&mut self, id: SessionId, is_clean: bool) {
        if !self.sessions.may_run(id) {
            return;
        }
        self.sessions.end(id);
        self.closing.push_back(id);
        self.reclaim.take_from(id.slot);
        if self.bindings.forget_session(id.number) || !is_clean {
            self.scan_all();
        }
    }

    /// Pids of the processes whose unfinished turns delay reclamation.
    pub fn delayed_by(&self) -> Vec<u32> {
        let dropping = self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Drop { leaving: Leaving::Chains(grace) | Leaving::Taken(grace), .. } => Some(grace),
            _ => None,
        });
        let others = dropping.flat_map(Grace::waiting_for);
        let others = others.chain(self.fences().flat_map(Fence::waiting_for));
        let revocations = self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Revoke(revocation) => Some(revocation),
            _ => None,
        });
        let others = others.chain(revocations.flat_map(Revocation::waiting_for));
        let rebuilding = self.catalog.iter().filter_map(|entry| entry.rebuild.as_ref()?.waiting_for());
        let others = others.chain(rebuilding.flat_map(Grace::waiting_for));
        let reuse = self.catalog.iter().filter_map(|entry| entry.reuse.waiting_for());
        let others = others.chain(reuse.flat_map(Grace::waiting_for));
        let others = others.chain(self.scan.iter().flat_map(|(scan, _)| scan.waiting_for()));
        let slots: Vec<u32> = self.reclaim.waiting_for().chain(others.map(|id| id.slot)).collect();
        self.sessions.iter().filter(|s| slots.contains(&s.id.slot)).map(|s| s.pid).collect()
    }

    /// Responds to the requests for fences and revocations that wait for one of these processes, which are stopped. The
    /// fences and revocations go on.
    pub fn report_stopped(&mut self, stopped: &[u32]) {
        for (_, job) in &mut self.jobs {
            let slots: Vec<u32> = match job {
                Job::Fence(fence) => fence.waiting_for().map(|id| id.slot).collect(),
                Job::Revoke(revocation) => revocation.waiting_for().map(|id| id.slot).collect(),
                _ => continue,
            };
            let sessions = self.sessions.iter().filter(|session| slots.contains(&session.id.slot));
            let pids = sessions.map(|session| session.pid).filter(|pid| stopped.contains(pid));
            let pids: BTreeSet<u32> = pids.collect();
            if !pids.is_empty() {
                let refusal = match job {
                    Job::Revoke(_) => replacing::delayed(&pids),
                    _ => identity::delayed(&pids),
                };
                let asked = job.asked().map(std::mem::take).unwrap_or_default();
                self.answers.extend(asked.into_iter().map(|ticket| (ticket, Err(refusal.clone()))));
            }
        }
    }

    /// Removes and returns the next remote session that its engine must end as fenced: the engine's index, and the
    /// session's number.
    pub fn ending(&mut self) -> Option<(usize, u32)> {
        self.bindings.endings.pop_front()
    }

    /// Whether the sender's session is fenced. None of its calls may be served then.
    pub fn is_fenced(&self, sender: Sender) -> bool {
        self.bindings.is_fenced(sender)
    }

    /// Checks that no open session is bound to a fenced nonce, except those that are being ended.
    ///
    /// # Errors
    /// Describes the violation.
    pub fn check_bindings(&self) -> Result<(), String> {
        let is_recorded =
            |region, nonce| self.catalog.by_region(region).is_some_and(|entry| entry.fenced.contains(&nonce));
        let unfenced = self.bindings.unfenced(is_recorded);
        unfenced.map_or(Ok(()), |nonce| Err(format!("a session is bound to the fenced nonce {nonce:016x}")))
    }

    fn fences(&self) -> impl Iterator<Item = &Fence> {
        self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Fence(fence) => Some(fence),
            _ => None,
        })
    }

    /// Requests larger tables for the stores whose tables have become crowded since the last call. Nobody waits for the
    /// responses. `entropy` draws the random bits of a request.
    pub fn grow_crowded(&mut self, mut entropy: impl FnMut() -> [u64; 2]) {
        for name in self.crowded() {
            let ticket = self.ask(Ask::GrowStore { name }, entropy());
            self.cancel(&BTreeSet::from([ticket]));
        }
    }

    /// The stores whose tables have become crowded since the last call and can be enlarged.
    fn crowded(&mut self) -> Vec<String> {
        let free = self.extents.free();
        let crowded = self.catalog.iter_mut().filter_map(|entry| {
            let is_crowded = std::mem::take(&mut entry.is_crowded);
            let may_begin = entry.rebuild.as_ref().is_none_or(Rebuild::wants_more);
            (is_crowded && may_begin && entry.segments_needed <= free).then(|| entry.store.name.clone())
        });
        crowded.collect()
    }

    /// Starts checks for retired buffers, for regions that are short of memory, and for crowded tables. The host calls
    /// this when a client rings, and at intervals.
    pub fn poll_shared(&mut self) {
        self.reclaim.poll();
        if self.relief.is_empty() {
            // A store without buffers is not short of them.
            let with_buffers = self.catalog.iter().filter(|entry| !entry.is_table_only());
            self.relief = with_buffers.map(|entry| (entry.store.region, 0)).collect();
        }
        if self.ticks.is_empty() {
            // One store per call, so that the cost does not grow with the number of stores.
            let regions = || self.catalog.iter().map(|entry| entry.store.region);
            let next = regions().filter(|&region| region > self.watched).min().or_else(|| regions().min());
            let rebuilt = self.catalog.iter().filter(|entry| entry.rebuild.is_some());
            self.ticks =
                rebuilt.map(|entry| entry.store.region).filter(|&region| Some(region) != next).collect();
            self.ticks.extend(next);
            self.watched = next.unwrap_or(0);
        }
    }

    /// Sets the time by the node's monotonic clock, and makes the services due whose time has come. The host calls this
    /// between steps, at least whenever [`Node::next_timer`] has passed.
    pub fn set_now(&mut self, now: Duration) {
        self.now = now;
        if self.timers.is_empty() {
            return;
        }
        // A timer ends with the service's next step, which may have to be tried again while a call holds its locks.
        let is_due = |(region, time): (&u32, &Duration)| (*time <= now).then_some(*region);
        let due: Vec<u32> = self.timers.iter().filter_map(is_due).collect();
        for region in due {
            if !self.ticks.contains(&region) {
                self.ticks.push_back(region);
            }
        }
    }

    /// Sets the source of the seeds of services' background steps, and of the salts of logs. Without it, they follow
    /// from the incarnation of the memory.
    pub fn set_seeds(&mut self, seeds: Seeds) {
        self.seeds = seeds;
    }

    /// Makes every store that is created from now on, and whose kind has logs, have one with these options. The caller
    /// runs the writers of the logs that [`Node::take_new_logs`] returns.
    pub fn set_logging(&mut self, options: LogOptions) {
        self.log_options = Some(options);
    }

    /// Removes and returns the logs that were begun and have no writer yet.
    pub fn take_new_logs(&mut self) -> Vec<Arc<StoreLog>> {
        std::mem::take(&mut self.new_logs)
    }

    /// Gives a store a log that an earlier node has left and that was replayed, or a new one.
    ///
    /// # Errors
    /// There is no such store.
    pub fn resume_log(&mut self, name: &str, log: Arc<StoreLog>) -> Result<(), String> {
        self.catalog.get(name)?.served.set_log(Arc::clone(&log));
        self.new_logs.push(log);
        Ok(())
    }

    /// Refuses a store for this reason until another node takes over: clients cannot open it. Other stores are served.
    ///
    /// # Errors
    /// There is no such store.
    pub fn refuse(&mut self, name: &str, reason: String) -> Result<(), String> {
        let region = self.catalog.get(name)?.store.region;
        if let Some(entry) = self.catalog.by_region_mut(region) {
            entry.refused = Some(reason);
        }
        Ok(())
    }

    fn check_not_refused(&self, name: &str) -> Result<(), String> {
        let refused = self.catalog.get(name)?.refused.as_ref();
        refused.map_or(Ok(()), |reason| Err(format!("store '{name}' is not served: {reason}")))
    }

    /// Name of the first store that is refused, and the reason.
    pub fn refused(&self) -> Option<(&str, &str)> {
        self.catalog.iter().find_map(|entry| Some((entry.store.name.as_str(), entry.refused.as_deref()?)))
    }

    /// The names of the stores that are served and have no log, although their kinds have logs.
    pub fn unlogged(&self) -> Vec<String> {
        let is_logged = |kind: &str| self.catalog.kind(kind).is_ok_and(|kind| kind.is_logged());
        let unlogged = self.catalog.iter().filter(|entry| {
            entry.served.log().is_none() && entry.refused.is_none() && is_logged(&entry.store.kind)
        });
        unlogged.map(|entry| entry.store.name.clone()).collect()
    }

    /// Creates a store anew, with the parameters, the id and the time of creation that it had at an earlier node, whose
    /// memory is lost. The store has no log before [`Node::resume_log`], and counts as incomplete before
    /// [`Node::pair`]. [`Node::answer`] returns the response.
    ///
    /// # Errors
    /// The store cannot be created.
    pub fn recreate(&mut self, store: &Store, secret: u64) -> Result<Ticket, String> {
        let plan =
            Plan { table_len: store.table_len, parameters: store.parameters.clone(), wide: store.wide };
        let (id, created) = (store.id, store.created);
        let paired = Some(Paired { number: 0, state: PairedState::Replaying });
        let origin = Origin { id, created, secret, membership: None, is_logged: false, paired };
        let job = self.begin_planned(&store.name, &store.kind, plan, store.quota, origin)?;
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        self.jobs.push_back((ticket, job));
        Ok(ticket)
    }

    /// The earliest time for which a service has asked, if any has.
    pub fn next_timer(&self) -> Option<Duration> {
        self.timers.values().min().copied()
    }

    /// Sets the time by the host's real-time clock, in microseconds since the Unix epoch. The host calls this before it
    /// passes a request.
    pub fn set_wall(&mut self, wall: u64) {
        self.wall = wall;
    }

    /// Accepts a request of the node's own process, like [`Node::ask_from`].
    pub fn ask(&mut self, ask: Ask, entropy: [u64; 2]) -> Ticket {
        self.ask_from(Sender::Host, ask, entropy)
    }

    /// Accepts a request and returns its ticket. [`Node::answer`] returns the response after some steps. `entropy` is
    /// random.
    pub fn ask_from(&mut self, sender: Sender, ask: Ask, entropy: [u64; 2]) -> Ticket {
        let ticket = self.next_ticket;
        self.next_ticket += 1;
        let begun = match self.bindings.is_fenced(sender) {
            true => Err(identity::fenced_session()),
            false => self.begin(ticket, sender, ask, entropy),
        };
        match begun {
            Ok(Some(answer)) => self.answers.push_back((ticket, Ok(answer))),
            Ok(None) => {}
            Err(refusal) => self.answers.push_back((ticket, Err(refusal))),
        }
        ticket
    }

    /// Cancels the responses to these tickets. Requests that only read are dropped; requests that change the catalog or
    /// memory are still carried out.
    pub fn cancel(&mut self, tickets: &BTreeSet<Ticket>) {
        let is_wanted = |ticket: &Ticket| !tickets.contains(ticket);
        self.stat_requests.iter_mut().for_each(|(_, asked)| asked.retain(is_wanted));
        self.stat_requests.retain(|(_, asked)| !asked.is_empty());
        let changes =
            |question: &Question| matches!(question, Question::Commit { .. } | Question::Change { .. });
        self.questions.retain(|(ticket, question)| changes(question) || is_wanted(ticket));
        self.answers.retain(|(ticket, _)| is_wanted(ticket));
        let scans = self.scans_due.iter_mut().map(|(_, asked)| asked);
        let rebuilds = self.catalog.iter_mut().filter_map(|entry| Some(&mut entry.rebuild.as_mut()?.asked));
        let scans = scans.chain(self.scan.iter_mut().map(|(_, asked)| asked));
        let jobs = self.jobs.iter_mut().filter_map(|(_, job)| job.asked());
        scans.chain(rebuilds).chain(jobs).for_each(|asked| asked.retain(is_wanted));
    }

    /// Removes and returns the next available response, if there is one.
    pub fn answer(&mut self) -> Option<(Ticket, Result<Answer, String>)> {
        self.answers.pop_front()
    }

    /// Makes a step of one part of the node, in rotation. Returns [`Progress::Idle`] once each part in turn had nothing
    /// to do. Each call runs only one part: even a part with nothing to do may change the node's own state after its
    /// last access, so no access may follow.
    ///
    /// # Panics
    /// The services that the node has taken over are not recovered yet ([`Node::recover_step`]).
    pub fn step(&mut self, memory: &M) -> Result<Progress, M::Wait> {
        assert!(self.recoveries.is_empty(), "a node recovers its services before it serves");
        type Part<M> = fn(&mut Node<M>, &M) -> Result<bool, <M as Memory>::Wait>;
        let parts: [Part<M>; 8] = [
            Node::close_step,
            Node::reclaim_step,
            Node::regrant_step,
            Node::catalog_step,
            Node::stat_request_step,
            Node::scan_step,
            Node::relief_step,
            Node::tick_step,
        ];
        let (part, idle) = self.rotation;
        let idle = if parts[part](self, memory)? { 0 } else { idle + 1 };
        let is_idle = idle == parts.len();
        self.rotation = ((part + 1) % parts.len(), if is_idle { 0 } else { idle });
        Ok(if is_idle { Progress::Idle } else { Progress::Made })
    }

    // The next functions handle requests.

    /// Responds at once if possible, or starts a job.
    fn begin(
        &mut self,
        ticket: Ticket,
        sender: Sender,
        ask: Ask,
        entropy: [u64; 2],
    ) -> Result<Option<Answer>, String> {
        let job = match ask {
            Ask::CreateStore { name, kind, parameters, quota } => {
                self.begin_create(&name, &kind, &parameters, quota, None, entropy)?
            }
            Ask::PrepareStore { name, kind, parameters, quota, membership } => {
                let wrong = membership.check(self.info.incarnation).err();
                let wrong = wrong.or_else(|| {
                    let is_new = matches!(membership.state, MemberState::Prepared | MemberState::Joining);
                    (!is_new).then(|| "a new member is PREPARED or JOINING".to_owned())
                });
                if let Some(wrong) = wrong {
                    return Err(format!(
                        "store '{name}' was not prepared: {wrong}: create it again, by a client of this release"
                    ));
                }
                self.begin_create(&name, &kind, &parameters, quota, Some(membership), entropy)?
            }
            Ask::Decide { name, attempt, decision } => {
                return self.begin_decision(ticket, name, attempt, decision);
            }
            Ask::FindStore { name } => {
                self.check_outstanding()?;
                self.questions.push_back((ticket, Question::Find { name }));
                return Ok(None);
            }
            Ask::DropStore { name } => {
                if let Some(membership) = &self.catalog.get(&name)?.store.membership {
                    return Err(format!(
                        "store '{name}' has {} members, and this node holds only one of them: drop it with all of its \
                         nodes in --pool",
                        membership.members.len()
                    ));
                }
                self.begin_drop(&name, Answer::Done)?
            }
            Ask::StoreStat { name } => {
                self.check_outstanding()?;
                self.check_not_refused(&name)?;
                let Store { id, quota, .. } = self.catalog.get(&name)?.store;
                let is_same =
                    |request: &StatRequest| request.name == name && request.id == id && request.at == (0, 0);
                match self.stat_requests.iter_mut().find(|(request, _)| is_same(request)) {
                    // That traversal has not begun, so its result will be up to date for this request, too.
                    Some((_, asked)) => asked.push(ticket),
                    None => {
                        let stat = Box::new(StoreStat { quota_bytes: quota, ..StoreStat::default() });
                        self.stat_requests
                            .push_back((StatRequest { name, id, at: (0, 0), stat }, vec![ticket]));
                    }
                }
                return Ok(None);
            }
            Ask::Scan { name } => {
                self.check_outstanding()?;
                let region = self.catalog.get(&name)?.store.region;
                self.scan_soon(region, Some(ticket));
                return Ok(None);
            }
            Ask::RebuildStore { name, parameters } => {
                self.check_outstanding()?;
                self.check_committed(&name)?;
                let entry = self.catalog.get(&name)?;
                if let Some(rebuild) = entry.rebuild.as_ref().filter(|rebuild| !rebuild.wants_more()) {
                    return Err(self.is_being_rebuilt(&name, rebuild));
                }
                return self.begin_rebuild(ticket, &name, Some(&parameters), entropy).map(|()| None);
            }
            Ask::GrowStore { name } => {
                self.check_outstanding()?;
                self.check_committed(&name)?;
                match &self.catalog.get(&name)?.rebuild {
                    Some(rebuild) if rebuild.wants_more() => {
                        self.begin_rebuild(ticket, &name, None, entropy)?
                    }
                    Some(rebuild) if rebuild.has_begun() => return Ok(Some(Answer::Done)),
                    Some(_) => self.ask_along(&name, ticket),
                    None => self.begin_rebuild(ticket, &name, None, entropy)?,
                }
                return Ok(None);
            }
            Ask::Bind { name, id, client, nonce } => {
                let entry = self.catalog.of_client(&name, id, nonce)?;
                if entry.fenced.contains(&nonce) && !mutants::FENCED_NONCE_BINDS.is_on() {
                    return Err(identity::fenced_nonce(&name));
                }
                self.bindings.bind(&self.sessions, sender, entry.store.region, (client, nonce))?;
                return Ok(Some(Answer::Done));
            }
            Ask::Wall { name, id } => {
                let entry = self.catalog.same(&name, id)?;
                return Ok(Some(Answer::Wall(self.wall.saturating_sub(entry.store.created))));
            }
            Ask::Fence { name, id, nonce } => {
                self.check_outstanding()?;
                let entry = self.catalog.of_client(&name, id, nonce)?;
                if entry.fenced.len() >= FENCED_MAX && !entry.fenced.contains(&nonce) {
                    return Err(identity::too_many_fenced(&name));
                }
                let region = entry.store.region;
                for (_, job) in &mut self.jobs {
                    if let Job::Fence(fence) = job
                        && (fence.id, fence.nonce) == (id, nonce)
                    {
                        fence.asked.push(ticket);
                        return Ok(None);
                    }
                }
                Job::Fence(Fence::new(region, id, nonce, ticket))
            }
            Ask::Promise { name, attempt, configuration, ballot } => {
                let change = Change::Promise { configuration, ballot };
                return self.begin_change(ticket, name, attempt, change).map(|()| None);
            }
            Ask::Accept { name, attempt, configuration, ballot, members } => {
                let change = Change::Accept { configuration, accepted: Accepted { ballot, members } };
                return self.begin_change(ticket, name, attempt, change).map(|()| None);
            }
            Ask::Enable { name, attempt, configuration, members } => {
                let change = Change::Enable { configuration, members, secret: entropy[1] };
                return self.begin_change(ticket, name, attempt, change).map(|()| None);
            }
            Ask::Revoke { name, attempt, configuration } => {
                return self.begin_revocation(ticket, &name, attempt, configuration, entropy[1]);
            }
            Ask::Leave { name, membership } => self.begin_leave(&name, &membership)?,
            Ask::OpenStore { name } => {
                self.check_committed(&name)?;
                return Ok(Some(Answer::Store(rebuild::shown(self.catalog.get(&name)?))));
            }
            Ask::ListStores => {
                let stores = self.catalog.iter().map(|entry| Store {
                    secret: 0,
                    id: 0,
                    created: 0,
                    ..rebuild::shown(entry)
                });
                return Ok(Some(Answer::Stores(stores.collect())));
            }
            Ask::NodeInfo => return Ok(Some(Answer::NodeInfo(self.info()))),
        };
        self.jobs.push_back((ticket, job));
        Ok(None)
    }

    fn check_outstanding(&self) -> Result<(), String> {
        let stat_requests = self.stat_requests.iter().map(|(_, asked)| asked.len());
        let due = self.scans_due.iter().map(|(_, asked)| asked.len());
        let under_way = self.scan.iter().map(|(_, asked)| asked.len());
        let rebuilds = self.catalog.iter().filter_map(|entry| Some(entry.rebuild.as_ref()?.asked.len()));
        let fences = self.jobs.iter().map(|(_, job)| match job {
            Job::Fence(fence) => fence.asked.len().max(1),
            Job::Revoke(revocation) => revocation.asked.len().max(1),
            _ => 0,
        });
        let others = stat_requests.chain(due).chain(under_way).chain(rebuilds).chain(fences).sum::<usize>();
        if others + self.questions.len() < WAITING_MAX {
            return Ok(());
        }
        Err(format!("{WAITING_MAX} requests about stores are outstanding, the maximum: retry later"))
    }

    /// Adds a ticket to the tickets that get the response of the rebuild in progress.
    fn ask_along(&mut self, name: &str, ticket: Ticket) {
        let entry = self.catalog.iter_mut().find(|entry| entry.store.name == name);
        if let Some(Rebuild { asked, .. }) = entry.and_then(|entry| entry.rebuild.as_mut()) {
            asked.push(ticket);
        }
    }

    // The next functions are steps of the node's parts. Each returns whether it did anything.

    fn close_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some(&id) = self.closing.front().filter(|id| self.reclaim.is_done_with(id.slot)) else {
            return Ok(false);
        };
        let counted = Arena::of(memory).counters(id.slot)?;
        self.sessions.close(memory, id.slot)?;
        self.reclaim.forget_session(id.slot);
        self.ended += 1;
        self.counted.add(&counted);
        self.closing.pop_front();
        Ok(true)
    }

    fn reclaim_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        if self.is_adopting() {
            return Ok(false);
        }
        let leased = LeasedStores { catalog: &self.catalog, jobs: &self.jobs };
        self.reclaim.step(memory, &self.sessions, &leased)
    }

    fn regrant_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        if self.is_adopting() { Ok(false) } else { self.reclaim.regrant_step(memory, &self.sessions) }
    }

    /// Whether a scan requires that no buffer is freed now.
    fn is_adopting(&self) -> bool {
        let is_adopting = self.scan.as_ref().is_some_and(|(scan, _)| scan.is_adopting());
        is_adopting && !mutants::REUSE_WHILE_ADOPTING.is_on()
    }

    fn scan_all(&mut self) {
        let regions: Vec<u32> = self.catalog.iter().map(|entry| entry.store.region).collect();
        regions.into_iter().for_each(|region| self.scan_soon(region, None));
    }

    fn scan_soon(&mut self, region: u32, asked: Option<Ticket>) {
        match self.scans_due.iter_mut().find(|(due, _)| *due == region) {
            Some((_, tickets)) => tickets.extend(asked),
            None => self.scans_due.push_back((region, asked.into_iter().collect())),
        }
    }

    fn scan_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some((scan, _)) = &mut self.scan else {
            // The node must take an ended session's retired buffers before a scan judges that session's other buffers.
            if !self.closing.is_empty() {
                return Ok(false);
            }
            let Some((region, tickets)) = self.scans_due.pop_front() else { return Ok(false) };
            self.scan = Some((Scan::new(region, &self.sessions), tickets));
            return Ok(true);
        };
        let region = scan.region;
        if let Some(entry) = self.catalog.by_region_mut(region) {
            let (has_ended, is_made) = entry.reuse.end_step(memory, &self.sessions, region)?;
            if !has_ended {
                return Ok(is_made);
            }
        }
        let entry = self.catalog.by_region(region);
        let made = match entry {
            Some(entry) => match entry.served.try_lock(Work::Live) {
                Some(served) => scan.step(memory, &mut self.sessions, &mut self.reclaim, served.service())?,
                None => false, // The service is busy with a call.
            },
            None => false, // The store was dropped, with all its buffers.
        };
        if (entry.is_none() || scan.is_done())
            && let Some((scan, tickets)) = self.scan.take()
        {
            self.info.scanned_buffers += scan.found;
            if let Some(entry) = self.catalog.by_region_mut(scan.region) {
                entry.scans += 1;
            }
            self.answers.extend(tickets.into_iter().map(|ticket| (ticket, Ok(Answer::Done))));
            return Ok(true);
        }
        Ok(made)
    }

    /// Makes one step that frees segments of a region which may be short of memory, for one class.
    fn relief_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some(&(region, class)) = self.relief.front() else { return Ok(false) };
        if self.catalog.by_region(region).is_none() {
            self.relief.pop_front();
            return Ok(true);
        }
        if class == 0 {
            let short = !Arena::of(memory).has_granted(region, Supply::Quota)?;
            self.reclaim.set_short(region, short);
        }
        let of = Class::get(class).filter(|_| self.reclaim.is_short(region));
        match of {
            None => drop(self.relief.pop_front()),
            Some(of) if self.reclaim.relieve(memory, region, of)? => {}
            Some(_) => self.relief[0].1 += 1,
        }
        Ok(true)
    }

    /// Makes one background step of one store's service, or of the rebuild of its table. Calls take the stores one
    /// after another.
    fn tick_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some(&region) = self.ticks.front() else { return Ok(false) };
        let made = self.rebuild_step(memory, region)?;
        self.ticks.pop_front();
        if made {
            self.ticks.push_back(region);
        }
        Ok(true)
    }

    fn stat_request_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some((StatRequest { name, id, at, stat }, _)) = self.stat_requests.front_mut() else {
            return Ok(false);
        };
        let entry = self.catalog.get(name).ok().filter(|entry| entry.store.id == *id);
        if let Some(entry) = entry
            && stat_step(memory, &entry.segments, at, stat)?.is_some()
        {
            return Ok(true);
        }
        let moved_percent = entry.and_then(|entry| Some(rebuild::shown(entry).former?.moved_percent));
        let delaying = entry.and_then(|entry| self.reclaim.waits_for_client(entry.store.region));
        let scans = entry.map(|entry| entry.scans);
        let service = entry.map_or(Vec::new(), |entry| entry.served.report());
        let service = service.into_iter().map(|(name, number)| (name.to_owned(), number)).collect();
        let Some((StatRequest { name, stat, .. }, asked)) = self.stat_requests.pop_front() else {
            return Ok(false);
        };
        let reported = match scans {
            Some(scans) => {
                let (delaying_pids, delaying_ids) = (self.delayed_by(), delaying.into_iter().collect());
                Ok(Answer::StoreStat(StoreStat {
                    delaying_pids,
                    delaying_ids,
                    moved_percent,
                    scans,
                    service,
                    ..*stat
                }))
            }
            None => Err(format!("store '{name}' was dropped in the meantime: list the existing stores")),
        };
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, reported.clone())));
        Ok(true)
    }
}

/// Whether the step did anything. `None` once the job is done.
type JobStep<W> = Result<Option<bool>, W>;

/// Number of segments (1 MiB each) of a new table that are prepared at its creation, since its keys will soon be spread
/// over the whole table. Clients prepare the other segments of a larger table when they fill them, so that the creator
/// does not wait too long.
const TABLE_FILLED_MAX: usize = 1024;

/// Announces that a table's segment will be filled, if its position `before` in the table is below
/// [`TABLE_FILLED_MAX`].
pub(crate) fn fill_table<M: NodeMemory>(memory: &M, before: usize, index: u32) {
    if before < TABLE_FILLED_MAX {
        memory.will_fill(memory.geometry().segment_at(index), SEGMENT_SIZE);
    }
}

/// Number of buffers that a statistics request reads in one step.
const STAT_BUFFERS: u32 = 8;

fn stat_step<M: NodeMemory>(
    memory: &M,
    segments: &[u32],
    at: &mut (usize, u32),
    stat: &mut StoreStat,
) -> JobStep<M::Wait> {
    let arena = Arena::of(memory);
    let (place, first) = *at;
    let Some(&index) = segments.get(place) else { return Ok(None) };
    let usage = arena.segment(index)?.usage;
    let mut seen = Vec::with_capacity(STAT_BUFFERS as usize);
    for ordinal in first..first + STAT_BUFFERS {
        let Some(found) = arena.buffer_state(index, ordinal)? else { break };
        seen.push(found);
    }
    if first == 0 {
        let bytes = match usage {
            Use::Table => &mut stat.table_bytes,
            Use::Granted => &mut stat.granted_bytes,
            _ => &mut stat.buffer_segment_bytes,
        };
        *bytes += SEGMENT_SIZE;
    }
    for (buffer, state) in &seen {
        let size = u64::from(buffer.class.size);
        match state.stage {
            Stage::Live => {
                (stat.live_buffers, stat.live_bytes) = (stat.live_buffers + 1, stat.live_bytes + size)
            }
            Stage::Free => {
                (stat.free_buffers, stat.free_bytes) = (stat.free_buffers + 1, stat.free_bytes + size)
            }
            Stage::Retired => stat.retired_buffers += 1,
            Stage::Parked => stat.parked_buffers += 1,
            Stage::Unused => {}
        }
    }
    let more = seen.len() == STAT_BUFFERS as usize;
    *at = if more { (place, first + STAT_BUFFERS) } else { (place + 1, 0) };
    Ok(Some(true))
}
