//! The node: a state machine that accepts requests, makes steps, and returns responses.
//!
//! Invariant: one step changes the catalog for at most one job, and the job's response is available only when the whole
//! job is done.
//! Invariant: a job that waits for a client's turn to end does not delay other jobs.

use crate::catalog::{Catalog, Division, Entry};
use crate::extents::Extents;
use crate::identity::{self, Bindings, FENCED_MAX, Fence, Fencing, Sender};
use crate::mutants;
use crate::rebuild::{self, Rebuild, Stage as RebuildStage};
use crate::reclaim::Reclaim;
use crate::restart::{self, Recorded};
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
use farside_remote::control::{
    Answer, Ask, Attempt, Decided, Decision, Found, MemberState, Membership, NodeInfo, Store, StoreStat,
};
use farside_remote::service::{Kind, Plan, Step, Tick};
use std::collections::{BTreeSet, VecDeque};
use std::sync::Arc;

/// Memory whose segments a node can also zero, which returns their pages to the system.
pub trait NodeMemory: Memory {
    /// Zeroes segment `index`, and returns its pages to the system if possible.
    fn discard(&self, index: u32) -> Result<(), Self::Wait>;
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
    bindings: Bindings,
    /// Number of engines among the sessions.
    engines: u64,
    /// Ended sessions whose retired buffers are still being taken.
    closing: VecDeque<SessionId>,
    reclaim: Reclaim,
    /// Stores being created or dropped, and fences. Each store has a region, so the number of regions bounds the number
    /// of stores' jobs. The number of fences is bounded together with that of other requests.
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
    /// Regions whose services have background steps to make.
    ticks: VecDeque<u32>,
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
}

/// A change of the catalog that takes several steps.
enum Job<M: NodeMemory> {
    Fence(Fence),
    Create {
        entry: Box<Entry<M>>,
        division: Division,
        granted: usize,
    },
    /// `answer` is the response at the end.
    Drop {
        entry: Box<Entry<M>>,
        leaving: Leaving,
        freed: usize,
        answer: Box<Answer>,
    },
}

/// A request about a member of a store that changes at most the member's state.
enum Question {
    Find { name: String },
    Commit { name: String, attempt: Attempt },
    Absent { name: String },
}

impl Question {
    fn name(&self) -> &str {
        match self {
            Question::Find { name } | Question::Commit { name, .. } | Question::Absent { name } => name,
        }
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

/// Progress of a dropped store's memory towards being unreferenced.
enum Leaving {
    /// The key of the store is still valid: leaving has not begun.
    Not,
    /// The key is revoked, but chains that it admitted may still run.
    Chains(Grace),
    /// The chains have ended, so no more buffers of the store will be retired. Buffers retired earlier are on sessions'
    /// lists, among buffers of other stores.
    Retired { is_round_begun: bool },
    /// No key and no pointer refers to the store's memory any more.
    Left,
}

impl<M: NodeMemory> Node<M> {
    /// Creates a node on fresh memory that supports these kinds of stores. `info` has the constant fields of
    /// [`Node::info`], which fills in the others.
    pub fn new(memory: &M, kinds: Vec<Box<dyn Kind<M>>>, info: NodeInfo) -> Node<M> {
        Node {
            extents: Extents::new(memory.geometry().segments()),
            catalog: Catalog::new(kinds),
            sessions: Sessions::new(1),
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
            ticks: VecDeque::new(),
            watched: 0,
            rotation: (0, 0),
            answers: VecDeque::new(),
            next_ticket: 1,
            info,
            geometry: memory.geometry(),
            catalog_sequence: 0,
            counted: Counters::default(),
        }
    }

    /// Creates a node on memory that another node served and that no process uses any more. The new node scans all
    /// stores for buffers that clients held.
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
        node.scan_all();
        Ok(Ok(node))
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
            Job::Drop { leaving: Leaving::Chains(grace), .. } => Some(grace),
            _ => None,
        });
        let others = dropping.flat_map(Grace::waiting_for);
        let others = others.chain(self.fences().flat_map(Fence::waiting_for));
        let rebuilding = self.catalog.iter().filter_map(|entry| entry.rebuild.as_ref()?.waiting_for());
        let others = others.chain(rebuilding.flat_map(Grace::waiting_for));
        let others = others.chain(self.scan.iter().flat_map(|(scan, _)| scan.waiting_for()));
        let slots: Vec<u32> = self.reclaim.waiting_for().chain(others.map(|id| id.slot)).collect();
        self.sessions.iter().filter(|s| slots.contains(&s.id.slot)).map(|s| s.pid).collect()
    }

    /// Responds to the requests for fences that wait for one of these processes, which are stopped. The fences go on.
    pub fn report_stopped(&mut self, stopped: &[u32]) {
        for (_, job) in &mut self.jobs {
            let Job::Fence(fence) = job else { continue };
            let slots: Vec<u32> = fence.waiting_for().map(|id| id.slot).collect();
            let sessions = self.sessions.iter().filter(|session| slots.contains(&session.id.slot));
            let pids = sessions.map(|session| session.pid).filter(|pid| stopped.contains(pid));
            let pids: BTreeSet<u32> = pids.collect();
            if !pids.is_empty() {
                let refusal = identity::delayed(&pids);
                let asked = std::mem::take(&mut fence.asked);
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

    fn fences(&self) -> impl Iterator<Item = &Fence> {
        self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Fence(fence) => Some(fence),
            _ => None,
        })
    }

    /// The stores whose tables have become crowded since the last call and can be enlarged. The host then requests the
    /// growth, since a request needs random bits.
    pub fn crowded(&mut self) -> Vec<String> {
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
        self.reclaim.begin_round(&self.sessions);
        if self.relief.is_empty() {
            self.relief = self.catalog.iter().map(|entry| (entry.store.region, 0)).collect();
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
        self.questions
            .retain(|(ticket, question)| matches!(question, Question::Commit { .. }) || is_wanted(ticket));
        self.answers.retain(|(ticket, _)| is_wanted(ticket));
        let scans = self.scans_due.iter_mut().map(|(_, asked)| asked);
        let rebuilds = self.catalog.iter_mut().filter_map(|entry| Some(&mut entry.rebuild.as_mut()?.asked));
        let scans = scans.chain(self.scan.iter_mut().map(|(_, asked)| asked));
        let fences = self.jobs.iter_mut().filter_map(|(_, job)| match job {
            Job::Fence(fence) => Some(&mut fence.asked),
            _ => None,
        });
        scans.chain(rebuilds).chain(fences).for_each(|asked| asked.retain(is_wanted));
    }

    /// Removes and returns the next available response, if there is one.
    pub fn answer(&mut self) -> Option<(Ticket, Result<Answer, String>)> {
        self.answers.pop_front()
    }

    /// Makes a step of one part of the node, in rotation. Returns [`Progress::Idle`] once each part in turn had nothing
    /// to do. Each call runs only one part: even a part with nothing to do may change the node's own state after its
    /// last access, so no access may follow.
    pub fn step(&mut self, memory: &M) -> Result<Progress, M::Wait> {
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
                    (membership.state != MemberState::Prepared).then(|| "a new member is PREPARED".to_owned())
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
                let entry = self.catalog.same(&name, id, nonce)?;
                if entry.fenced.contains(&nonce) && !mutants::FENCED_NONCE_BINDS.is_on() {
                    return Err(identity::fenced_nonce(&name));
                }
                self.bindings.bind(&self.sessions, sender, entry.store.region, (client, nonce))?;
                return Ok(Some(Answer::Done));
            }
            Ask::Fence { name, id, nonce } => {
                self.check_outstanding()?;
                let entry = self.catalog.same(&name, id, nonce)?;
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
            Ask::OpenStore { name } => {
                self.check_committed(&name)?;
                return Ok(Some(Answer::Store(rebuild::shown(self.catalog.get(&name)?))));
            }
            Ask::ListStores => {
                let stores =
                    self.catalog.iter().map(|entry| Store { secret: 0, id: 0, ..rebuild::shown(entry) });
                return Ok(Some(Answer::Stores(stores.collect())));
            }
            Ask::NodeInfo => return Ok(Some(Answer::NodeInfo(self.info()))),
        };
        self.jobs.push_back((ticket, job));
        Ok(None)
    }

    /// Starts to drop a store. The node forgets it at once, and responds with `answer` when its memory is free.
    fn begin_drop(&mut self, name: &str, answer: Answer) -> Result<Job<M>, String> {
        let mut entry = Box::new(self.catalog.remove(name)?);
        self.bindings.forget_store(entry.store.region);
        let asked = entry.rebuild.take().map_or(Vec::new(), |rebuild| rebuild.asked);
        let dropped = Err(format!("store '{name}' was dropped in the meantime"));
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, dropped.clone())));
        Ok(Job::Drop { entry, leaving: Leaving::Not, freed: 0, answer: Box::new(answer) })
    }

    /// Handles a decision on an attempt to create a store with several members. The first decision holds: only a drop
    /// changes a committed store, and nothing changes an aborted one.
    fn begin_decision(
        &mut self,
        ticket: Ticket,
        name: String,
        attempt: Attempt,
        decision: Decision,
    ) -> Result<Option<Answer>, String> {
        let member = self.catalog.get(&name).ok().and_then(|entry| entry.store.membership.as_ref());
        let member = member.filter(|member| member.attempt == attempt);
        let (is_first, state) = match member {
            Some(member) => (member.index == 0, member.state),
            None => (false, MemberState::Aborted),
        };
        match (decision, state) {
            (_, MemberState::Aborted) => {
                self.check_outstanding()?;
                self.questions.push_back((ticket, Question::Absent { name }));
            }
            (Decision::Commit, MemberState::Prepared) => {
                self.check_outstanding()?;
                self.questions.push_back((ticket, Question::Commit { name, attempt }));
            }
            (Decision::Commit, MemberState::Committed) => return Ok(Some(self.decided(state))),
            (Decision::Abort, MemberState::Committed) if is_first && !mutants::BOTH_DECISIONS.is_on() => {
                return Ok(Some(self.decided(state)));
            }
            (Decision::Abort | Decision::Drop, _) => {
                let job = self.begin_drop(&name, self.decided(MemberState::Aborted))?;
                self.jobs.push_back((ticket, job));
            }
        }
        Ok(None)
    }

    fn decided(&self, state: MemberState) -> Answer {
        Answer::Decided(Decided { incarnation: self.info.incarnation, state })
    }

    /// # Errors
    /// The store is PREPARED, so nobody may use it yet.
    fn check_committed(&self, name: &str) -> Result<(), String> {
        if self.catalog.get(name)?.store.is_prepared() {
            return Err(format!(
                "store '{name}' is being created on several nodes: retry with all of its nodes in --pool, or drop it"
            ));
        }
        Ok(())
    }

    fn check_outstanding(&self) -> Result<(), String> {
        let stat_requests = self.stat_requests.iter().map(|(_, asked)| asked.len());
        let due = self.scans_due.iter().map(|(_, asked)| asked.len());
        let under_way = self.scan.iter().map(|(_, asked)| asked.len());
        let rebuilds = self.catalog.iter().filter_map(|entry| Some(entry.rebuild.as_ref()?.asked.len()));
        let fences = self.fences().map(|fence| fence.asked.len().max(1));
        let others = stat_requests.chain(due).chain(under_way).chain(rebuilds).chain(fences).sum::<usize>();
        if others + self.questions.len() < WAITING_MAX {
            return Ok(());
        }
        Err(format!("{WAITING_MAX} requests about stores are outstanding, the maximum: retry later"))
    }

    fn begin_create(
        &mut self,
        name: &str,
        kind: &str,
        parameters: &str,
        quota: u64,
        membership: Option<Membership>,
        [seed, secret]: [u64; 2],
    ) -> Result<Job<M>, String> {
        let plan = self.catalog.kind(kind)?.plan(parameters, quota, seed)?;
        let division = Division::of(quota, plan.table_len)?;
        if division.segments() > self.extents.free() {
            return Err(format!(
                "the store needs {} MiB and the node has {} MiB unassigned: give it a smaller --quota, drop \
                 another store, or serve more --memory",
                division.segments(),
                self.extents.free()
            ));
        }
        let region = self.catalog.reserve(name)?;
        let Some(first) = self.extents.take_run(division.table) else {
            self.catalog.release(region);
            return Err(format!(
                "the node has no {} MiB of adjacent segments for the table: use fewer --items, or drop a store",
                division.table
            ));
        };
        let mut segments: Vec<u32> = (first..first + division.table).collect();
        segments.extend(self.extents.take(division.buffers + division.reserve).expect("they were free"));
        let store = Store {
            name: name.to_owned(),
            kind: kind.to_owned(),
            parameters: plan.parameters,
            quota,
            incarnation: self.info.incarnation,
            region,
            secret: secret.max(1),
            table_at: self.geometry.segment_at(first),
            table_len: u64::from(division.table) * SEGMENT_SIZE,
            wide: plan.wide,
            id: seed,
            former: None,
            membership,
        };
        // Reserve space in the catalog's record for stores that are still being created.
        let fits = restart::record(1, &self.stores_and(self.being_made().chain([&store])));
        match fits.and_then(|_| self.catalog.kind(kind)?.serve(&store.parameters, store.extent())) {
            Ok(service) => {
                let entry = Box::new(Entry::new(store, service, segments));
                Ok(Job::Create { entry, division, granted: 0 })
            }
            Err(reason) => {
                segments.into_iter().for_each(|index| self.extents.give(index));
                self.catalog.release(region);
                Err(reason)
            }
        }
    }

    fn begin_rebuild(
        &mut self,
        ticket: Ticket,
        name: &str,
        parameters: Option<&str>,
        [seed, secret]: [u64; 2],
    ) -> Result<(), String> {
        let free = self.extents.free();
        let region = self.catalog.get(name)?.store.region;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(()) };
        if parameters.is_none() && entry.segments_needed > free {
            return Err(no_room_for_table(entry.segments_needed, free));
        }
        let mut served = entry.served.try_lock().ok_or("the store's service is busy with a call: retry")?;
        let quota = entry.store.quota + Division::reserve_of(entry.store.quota / SEGMENT_SIZE) * SEGMENT_SIZE;
        rebuild::of(served.service())?.survey(parameters.unwrap_or("{}"), quota, seed)?;
        drop(served);
        // A rebuild in progress already has a secret for the store: use it, since the catalog contains it.
        let next_secret = entry.rebuild.as_ref().map_or(secret.max(1), |rebuild| rebuild.next_secret);
        entry.rebuild = Some(Rebuild::new(vec![ticket], parameters.is_none(), next_secret));
        if !self.ticks.contains(&region) {
            self.ticks.push_back(region);
        }
        Ok(())
    }

    fn is_being_rebuilt(&self, name: &str, rebuild: &Rebuild) -> String {
        let being_rebuilt = format!("the table of store '{name}' is being rebuilt");
        let grace = rebuild.waiting_for();
        let slots: BTreeSet<u32> =
            grace.iter().flat_map(|grace| grace.waiting_for()).map(|id| id.slot).collect();
        let sessions = self.sessions.iter().filter(|session| slots.contains(&session.id.slot));
        let pids = sessions.map(|session| format!("process {}", session.pid));
        let whom: Vec<String> = pids.collect();
        if whom.is_empty() {
            return format!("{being_rebuilt}: wait until it is done");
        }
        let whom = whom.join(", ");
        format!(
            "{being_rebuilt}: all entries are moved, but {whom} may still use the former table; wait for it, or end it \
             if it is stopped"
        )
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
        self.counted.add(&counted);
        self.closing.pop_front();
        Ok(true)
    }

    fn reclaim_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        if self.is_adopting() { Ok(false) } else { self.reclaim.step(memory, &self.sessions) }
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
        let entry = self.catalog.by_region(scan.region);
        let made = match entry {
            Some(entry) => match entry.served.try_lock() {
                Some(mut served) => {
                    scan.step(memory, &mut self.sessions, &mut self.reclaim, served.service())?
                }
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

    /// Makes one step of a store's rebuild. Returns false if there is nothing more to do for the store until the next
    /// check.
    fn rebuild_step(&mut self, memory: &M, region: u32) -> Result<bool, M::Wait> {
        let is_scanned = self.scan.as_ref().is_some_and(|(scan, _)| scan.region == region);
        let sequence = self.catalog_sequence + 1;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(false) };
        let Some(mut served) = entry.served.try_lock() else { return Ok(false) }; // Busy with a call.
        let service = served.service();
        let Some(Rebuild { stage, next_secret, is_stuck, .. }) = &mut entry.rebuild else {
            let tick = service.tick(memory)?;
            entry.is_crowded |= service.rebuild().is_some_and(|rebuild| rebuild.is_crowded());
            return Ok(tick == Tick::Made);
        };
        let Some(service) = service.rebuild() else { return Ok(false) };
        let next_secret = *next_secret;
        match stage {
            RebuildStage::Survey => {
                let step = service.step(memory, &mut Vec::new())?;
                drop(served);
                match step {
                    Step::Wants(plan) => self.grant_table(region, plan),
                    Step::Content => self.end_rebuild(region, Err(NOT_CROWDED.into())),
                    _ => {}
                }
            }
            RebuildStage::Grant { plan, segments, granted } => {
                if rebuild::grant_step(memory, region, segments, granted)? {
                    return Ok(true);
                }
                let table_at = self.geometry.segment_at(segments[0]);
                let store = rebuild::with_both(&entry.store, plan, table_at, next_secret);
                let segments = segments.clone();
                drop(served);
                self.publish_both(memory, store, segments)?;
            }
            RebuildStage::Move => {
                let mut dropped = Vec::new();
                let step = service.step(memory, &mut dropped)?;
                drop(served);
                dropped.into_iter().for_each(|at| self.reclaim.add(at));
                match step {
                    Step::Moved if is_scanned => return Ok(false), // The scan's cursor counts slots of both tables.
                    Step::Moved => {
                        let store = rebuild::with_one(&entry.store, next_secret);
                        self.publish_one(memory, sequence, store)?;
                    }
                    Step::Made => {}
                    Step::Stuck => {
                        (*is_stuck, entry.is_crowded) = (true, true);
                        return Ok(false);
                    }
                    _ => return Ok(false),
                }
            }
            RebuildStage::Leave { grace, segments } => {
                let has_begun = grace.is_some();
                if !rebuild::is_left(memory, &mut self.sessions, grace)? {
                    return Ok(!has_begun);
                }
                *stage = RebuildStage::Free { segments: std::mem::take(segments) };
            }
            RebuildStage::Free { segments } => {
                if !rebuild::free_step(memory, &mut self.extents, segments, &mut entry.segments)? {
                    entry.rebuild = entry.store.former.as_ref().map(Rebuild::resumed);
                }
            }
        }
        Ok(true)
    }

    /// Takes the segments for a store's next table, if enough adjacent segments are free.
    fn grant_table(&mut self, region: u32, plan: Plan) {
        let count = u32::try_from(plan.table_len.div_ceil(SEGMENT_SIZE)).unwrap_or(u32::MAX);
        let (first, free) = (self.extents.take_run(count), self.extents.free());
        let Some(entry) = self.catalog.by_region_mut(region) else { return };
        let (Some(first), Some(rebuild)) = (first, &mut entry.rebuild) else {
            if entry.rebuild.as_ref().is_some_and(|rebuild| rebuild.is_growth) {
                entry.segments_needed = count.max(free + 1); // If enough are free but not adjacent, more may help.
            }
            let reason = no_room_for_table(count, free);
            return self.end_rebuild(region, Err(reason));
        };
        let segments: Vec<u32> = (first..first + count).collect();
        entry.segments.extend(&segments);
        entry.segments_needed = 0;
        rebuild.stage = RebuildStage::Grant { plan, segments, granted: 0 };
    }

    /// Publishes both tables of a store. If that is impossible, starts to free the granted segments.
    fn publish_both(&mut self, memory: &M, store: Store, segments: Vec<u32>) -> Result<(), M::Wait> {
        let region = store.region;
        let served = self.catalog.serve(&store);
        let stores = self.stores_with(&store);
        let being_made = self.being_made().map(Recorded::from);
        let fits =
            restart::record(1, &self.stores_with(&store).into_iter().chain(being_made).collect::<Vec<_>>());
        let service = match served.and_then(|service| fits.map(|_| service)) {
            Ok(service) => service,
            Err(reason) => {
                self.end_rebuild(region, Err(reason));
                if let Some(entry) = self.catalog.by_region_mut(region) {
                    entry.rebuild = Some(Rebuild::freeing(segments));
                }
                return Ok(());
            }
        };
        let record = restart::record(self.catalog_sequence + 1, &stores);
        self.write_catalog(memory, &record.expect("it fit together with the stores being created"))?;
        self.catalog_sequence += 1;
        let Some(entry) = self.catalog.by_region_mut(region) else { return Ok(()) };
        (entry.served, entry.store) = (Served::new(&store, service), store);
        let Some(rebuild) = &mut entry.rebuild else { return Ok(()) };
        (rebuild.stage, rebuild.is_stuck) = (RebuildStage::Move, false);
        let asked = std::mem::take(&mut rebuild.asked);
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, Ok(Answer::Done))));
        Ok(())
    }

    /// Publishes a store that has left its former tables: only its next table, with another key.
    fn publish_one(&mut self, memory: &M, sequence: u64, store: Store) -> Result<(), M::Wait> {
        let service = self.catalog.serve(&store).expect("it was served together with its former tables");
        let record =
            restart::record(sequence, &self.stores_with(&store)).expect("the previous record was larger");
        self.write_catalog(memory, &record)?;
        let Some(entry) = self.catalog.by_region_mut(store.region) else { return Ok(()) };
        Arena::of(memory).set_secret(store.region, store.secret)?;
        let formers = entry.store.formers().into_iter().map(|(_, extent)| extent);
        let segments = formers.flat_map(|of| rebuild::segments_of(self.geometry, of.at, of.len)).collect();
        (entry.served, entry.store) = (Served::new(&store, service), store);
        self.catalog_sequence = sequence;
        if let Some(rebuild) = &mut entry.rebuild {
            rebuild.stage = RebuildStage::Leave { grace: None, segments };
        }
        Ok(())
    }

    /// Abandons the requested table. If an earlier move was in progress, that move continues.
    fn end_rebuild(&mut self, region: u32, reported: Result<Answer, String>) {
        let Some(entry) = self.catalog.by_region_mut(region) else { return };
        let resumed = entry.store.former.as_ref().map(Rebuild::resumed);
        let ended = std::mem::replace(&mut entry.rebuild, resumed);
        let asked = ended.map_or(Vec::new(), |rebuild| rebuild.asked);
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, reported.clone())));
    }

    /// Makes a step of a job, or answers a question about a member. If both are possible, takes turns.
    fn catalog_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let is_answerable =
            self.questions.front().is_some_and(|(_, question)| self.is_recorded(question.name()));
        if is_answerable && (!self.has_answered || self.jobs.is_empty()) {
            let is_done = self.question_step(memory)?;
            self.has_answered = true;
            return Ok(is_done);
        }
        let is_done = self.job_step(memory)?;
        self.has_answered = false;
        Ok(is_done || is_answerable)
    }

    /// Whether the catalog's record says about this store what the catalog says. If not, a job's next step writes it.
    fn is_recorded(&self, name: &str) -> bool {
        !self.jobs.iter().any(|(_, job)| match job {
            Job::Drop { entry, leaving: Leaving::Not, .. } => entry.store.name == name,
            _ => false,
        })
    }

    /// Makes a step of the current job. If that job waits, goes on to the next job.
    fn job_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let (place, waiting) = self.at_job;
        let is_forgetting =
            matches!(self.jobs.get(place), Some((_, Job::Drop { leaving: Leaving::Not, .. })));
        if is_forgetting {
            // Record that the store is dropped, so that a node which takes over does not know it either.
            let record = restart::record(self.catalog_sequence + 1, &self.stores_and([]));
            self.write_catalog(memory, &record.expect("the previous record had one more store"))?;
        }
        let is_unrecorded =
            matches!(self.jobs.get(place), Some((_, Job::Fence(Fence { stage: Fencing::Record, .. }))));
        if is_unrecorded {
            self.fence_step(memory, place)?;
            self.at_job.1 = 0;
            return Ok(true);
        }
        let Some((_, job)) = self.jobs.get_mut(place) else { return Ok(false) };
        let ended = match job {
            Job::Fence(fence) => fence.end_step(memory, &self.sessions)?,
            Job::Create { entry, division, granted } => grant_step(memory, entry, division, granted)?,
            Job::Drop { leaving: Leaving::Left, entry, freed, .. } => {
                free_step(memory, &mut self.extents, entry, freed)?
            }
            Job::Drop { entry, leaving, .. } => {
                leave_step(memory, &self.sessions, &mut self.reclaim, entry, leaving)?
            }
        };
        self.catalog_sequence += u64::from(is_forgetting);
        match ended {
            None => self.end_job(memory, place)?,
            Some(true) => self.at_job.1 = 0,
            Some(false) => {
                // There is work while a job remains that was not tried since the last job made progress.
                let is_any_left = waiting + 1 < self.jobs.len();
                self.at_job = ((place + 1) % self.jobs.len(), if is_any_left { waiting + 1 } else { 0 });
                return Ok(is_any_left);
            }
        }
        Ok(true)
    }

    /// Makes the first step of a fence: records the nonce, then marks the sessions that are bound to it.
    fn fence_step(&mut self, memory: &M, place: usize) -> Result<(), M::Wait> {
        let Some((_, Job::Fence(Fence { region, id, nonce, .. }))) = self.jobs.get(place) else {
            return Ok(());
        };
        let (region, id, nonce) = (*region, *id, *nonce);
        let entry = self.catalog.by_region(region).filter(|entry| entry.store.id == id);
        let recorded = match entry {
            Some(entry) if entry.fenced.contains(&nonce) => Ok(None),
            Some(_) => {
                let fenced = || {
                    self.catalog.iter().map(|entry| {
                        let mut recorded = Recorded::from(entry);
                        if entry.store.region == region {
                            recorded.fenced.to_mut().insert(nonce);
                        }
                        recorded
                    })
                };
                // The stores that are still being created have space in the record.
                let fits = restart::record(
                    1,
                    &fenced().chain(self.being_made().map(Recorded::from)).collect::<Vec<_>>(),
                );
                fits.and_then(|_| restart::record(self.catalog_sequence + 1, &fenced().collect::<Vec<_>>()))
                    .map(Some)
            }
            None => Err("the store was dropped in the meantime, and nobody was fenced".to_owned()),
        };
        if let Ok(Some(record)) = &recorded {
            self.write_catalog(memory, record)?;
            self.catalog_sequence += 1;
        }
        if let Some(entry) = self.catalog.by_region_mut(region).filter(|_| recorded.is_ok()) {
            entry.fenced.insert(nonce);
        }
        let Some((_, Job::Fence(fence))) = self.jobs.get_mut(place) else { return Ok(()) };
        fence.stage = match recorded {
            Ok(_) => self.bindings.fence(region, nonce),
            Err(reason) => {
                fence.outcome = Err(reason);
                Fencing::nobody()
            }
        };
        Ok(())
    }

    fn stores_and<'a>(&'a self, more: impl IntoIterator<Item = &'a Store>) -> Vec<Recorded<'a>> {
        self.catalog.iter().map(Recorded::from).chain(more.into_iter().map(Recorded::from)).collect()
    }

    /// All stores of the catalog, with `changed` in the place of the store of the same region.
    fn stores_with<'a>(&'a self, changed: &'a Store) -> Vec<Recorded<'a>> {
        let stores = self.catalog.iter().map(Recorded::from);
        let changed = |recorded: Recorded<'a>| match recorded.store.region == changed.region {
            true => Recorded { store: changed, ..recorded },
            false => recorded,
        };
        stores.map(changed).collect()
    }

    fn being_made(&self) -> impl Iterator<Item = &Store> {
        self.jobs.iter().filter_map(|(_, job)| match job {
            Job::Create { entry, .. } => Some(&entry.store),
            Job::Drop { .. } | Job::Fence(_) => None,
        })
    }

    /// Writes the next record of the catalog. The record takes effect once all accesses of the step have completed.
    fn write_catalog(&self, memory: &M, record: &[u8]) -> Result<(), M::Wait> {
        memory.write(Geometry::catalog_at(self.catalog_sequence + 1), record)
    }

    /// Removes the completed job at index `place`, makes its change of the catalog, and makes its response available.
    fn end_job(&mut self, memory: &M, place: usize) -> Result<(), M::Wait> {
        if let Some((_, Job::Create { entry, .. })) = self.jobs.get(place) {
            let record = restart::record(self.catalog_sequence + 1, &self.stores_and([&entry.store]));
            self.write_catalog(memory, &record.expect("its size was checked when the job began"))?;
            self.catalog_sequence += 1;
        }
        let Some((ticket, job)) = self.jobs.remove(place) else { return Ok(()) };
        self.at_job = (if place < self.jobs.len() { place } else { 0 }, 0);
        let answer = match job {
            Job::Fence(Fence { asked, outcome, .. }) => {
                let answer = outcome.map(|()| Answer::Done);
                self.answers.extend(asked.into_iter().map(|ticket| (ticket, answer.clone())));
                return Ok(());
            }
            Job::Create { entry, .. } => {
                let store = without_key_if_prepared(entry.store.clone());
                self.catalog.insert(*entry);
                Answer::Store(store)
            }
            Job::Drop { entry, answer, .. } => {
                self.reclaim.forget(entry.store.region);
                self.catalog.release(entry.store.region);
                *answer
            }
        };
        self.answers.push_back((ticket, Ok(answer)));
        Ok(())
    }

    /// Answers the first question about a member, whose store is recorded ([`Node::is_recorded`]). The response says
    /// only what the catalog's record says: a node that takes over must not know another answer.
    fn question_step(&mut self, memory: &M) -> Result<bool, M::Wait> {
        let Some((_, question)) = self.questions.front() else { return Ok(false) };
        let entry = self.catalog.get(question.name()).ok();
        let answer = match question {
            Question::Find { .. } => {
                let store = entry.map(|entry| Store { secret: 0, id: 0, ..rebuild::shown(entry) });
                Ok(Answer::Found(Found { incarnation: self.info.incarnation, store }))
            }
            Question::Absent { .. } => Ok(self.decided(MemberState::Aborted)),
            Question::Commit { attempt, .. } => {
                let member = entry.and_then(|entry| entry.store.membership.as_ref());
                match member.filter(|member| member.attempt == *attempt).map(|member| member.state) {
                    Some(MemberState::Prepared) => {
                        let region = entry.map_or(0, |entry| entry.store.region);
                        self.commit(memory, region)?.map(|()| self.decided(MemberState::Committed))
                    }
                    state => Ok(self.decided(state.unwrap_or(MemberState::Aborted))),
                }
            }
        };
        let Some((ticket, _)) = self.questions.pop_front() else { return Ok(false) };
        self.answers.push_back((ticket, answer));
        Ok(true)
    }

    /// Commits a prepared store: writes the record, then the key. The inner error is the reason if the record does not
    /// fit.
    fn commit(&mut self, memory: &M, region: u32) -> Result<Result<(), String>, M::Wait> {
        let Some(entry) = self.catalog.by_region(region) else { return Ok(Ok(())) };
        let mut store = entry.store.clone();
        if let Some(membership) = &mut store.membership {
            membership.state = MemberState::Committed;
        }
        let record = match restart::record(self.catalog_sequence + 1, &self.stores_with(&store)) {
            Ok(record) => record,
            Err(reason) => return Ok(Err(reason)),
        };
        self.write_catalog(memory, &record)?;
        Arena::of(memory).set_secret(region, store.secret)?;
        self.catalog_sequence += 1;
        if let Some(entry) = self.catalog.by_region_mut(region) {
            entry.store = store;
        }
        Ok(Ok(()))
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
        let scans = entry.map(|entry| entry.scans);
        let Some((StatRequest { name, stat, .. }, asked)) = self.stat_requests.pop_front() else {
            return Ok(false);
        };
        let reported = match scans {
            Some(scans) => {
                let delaying_pids = self.delayed_by();
                Ok(Answer::StoreStat(StoreStat { delaying_pids, moved_percent, scans, ..*stat }))
            }
            None => Err(format!("store '{name}' was dropped in the meantime: list the existing stores")),
        };
        self.answers.extend(asked.into_iter().map(|ticket| (ticket, reported.clone())));
        Ok(true)
    }
}

fn without_key_if_prepared(store: Store) -> Store {
    if store.is_prepared() { Store { secret: 0, id: 0, ..store } } else { store }
}

const NOT_CROWDED: &str = "all slots for the key are taken, although the table as a whole is not crowded: enlarge it \
                           with 'farside store rebuild --items'";

fn no_room_for_table(needed: u32, free: u32) -> String {
    format!(
        "a larger table needs {needed} MiB of adjacent segments, and the node has {free} MiB unassigned: drop another \
         store, or serve more --memory"
    )
}

/// Whether the step did anything. `None` once the job is done.
type JobStep<W> = Result<Option<bool>, W>;

/// Assigns one more segment to a store that is being created. Writes the store's key last.
fn grant_step<M: NodeMemory>(
    memory: &M,
    entry: &Entry<M>,
    division: &Division,
    granted: &mut usize,
) -> JobStep<M::Wait> {
    let arena = Arena::of(memory);
    let region = entry.store.region;
    let Some(&index) = entry.segments.get(*granted) else {
        // The key of a PREPARED store opens nothing.
        let secret = if entry.store.is_prepared() { 0 } else { entry.store.secret };
        arena.set_secret(region, secret)?;
        return Ok(None);
    };
    let (table, quota) = (division.table as usize, (division.table + division.buffers) as usize);
    let segment = arena.segment(index)?;
    let usage = if *granted < table { Use::Table } else { Use::Granted };
    if !arena.assign(index, segment, region, usage)? {
        return Ok(Some(true)); // A peer without the right to do so has changed it: retry.
    }
    if usage == Use::Table {
        fill_table(memory, *granted, index);
    }
    if *granted >= table {
        let supply = if *granted < quota { Supply::Quota } else { Supply::Reserve };
        arena.grant(region, supply, index)?;
    }
    *granted += 1;
    Ok(Some(true))
}

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

/// Makes one step of a store's drop. The steps revoke the key, wait until no chain can run in the region, then wait
/// until no buffer of the region is on a session's retired list: a list that links through freed memory would be cut
/// there.
fn leave_step<M: NodeMemory>(
    memory: &M,
    sessions: &Sessions,
    reclaim: &mut Reclaim,
    entry: &Entry<M>,
    leaving: &mut Leaving,
) -> JobStep<M::Wait> {
    match leaving {
        Leaving::Not => {
            Arena::of(memory).set_secret(entry.store.region, 0)?;
            *leaving = Leaving::Chains(sessions.begin_grace(memory)?);
        }
        Leaving::Chains(grace) => {
            if !sessions.is_over(memory, grace)? {
                return Ok(Some(false));
            }
            *leaving = match mutants::DROP_WITHOUT_TAKING_LISTS.is_on() {
                false => Leaving::Retired { is_round_begun: false },
                true => Leaving::Left,
            };
        }
        Leaving::Retired { .. } if !reclaim.is_between_rounds() => return Ok(Some(false)),
        Leaving::Retired { is_round_begun: false } => {
            reclaim.begin_round(sessions);
            *leaving = Leaving::Retired { is_round_begun: true };
        }
        Leaving::Retired { is_round_begun: true } | Leaving::Left => {
            let segments: BTreeSet<u32> = entry.segments.iter().copied().collect();
            let geometry = memory.geometry();
            let is_of_it = |at| geometry.segment_of(at).is_some_and(|index| segments.contains(&index));
            reclaim.forget_buffers(is_of_it);
            *leaving = Leaving::Left;
        }
    }
    Ok(Some(true))
}

/// Frees one segment of a store that is being dropped and to which nothing refers any more.
fn free_step<M: NodeMemory>(
    memory: &M,
    extents: &mut Extents,
    entry: &Entry<M>,
    freed: &mut usize,
) -> JobStep<M::Wait> {
    let arena = Arena::of(memory);
    let Some(&index) = entry.segments.get(*freed) else {
        arena.clear_region(entry.store.region)?;
        return Ok(None);
    };
    // Zero the segment before its entry changes: if the node dies in between, the next node must not find a free
    // segment with data.
    memory.discard(index)?;
    let segment = arena.segment(index)?;
    if !arena.assign(index, segment, 0, Use::Free)? {
        return Ok(Some(true)); // A peer without the right to do so has changed it: retry.
    }
    extents.give(index);
    *freed += 1;
    Ok(Some(true))
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
