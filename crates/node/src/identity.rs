//! Which client each session belongs to, and the end of all sessions of a fenced client.
//!
//! A client draws a random nonce when it starts, and binds each of its sessions to it, for each store by itself. A
//! fence records the nonce in the catalog, ends the sessions that are bound to it, and waits until none of them runs a
//! chain. A session with a slot learns of its end from the slot, a remote session from its engine.
//!
//! Invariant: a fenced nonce is in the catalog's record before a session of the client is ended, and stays there until
//! its store is dropped. So no session is bound to it later, not even at a node that takes over.
//! Invariant: once a fence is answered, no session that was bound to its nonce runs a chain or a call.

use crate::mutants;
use crate::node::Ticket;
use crate::session::{Grace, Sessions};
use farside_remote::Memory;
use farside_remote::arena::Arena;
use farside_remote::arena::session::SessionId;
use farside_remote::fabric::FENCED;
use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// Maximum number of fenced nonces of one store. Each takes up to 21 bytes of the catalog, which all stores share.
pub const FENCED_MAX: usize = 1024;

/// The sender of a request to the node.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Sender {
    /// The node's own process, in no session.
    Host,
    /// A session with a slot.
    Slot(SessionId),
    /// A remote session.
    Remote {
        /// Index of the session's engine.
        engine: usize,
        /// Number of the session.
        number: u32,
    },
}

impl Sender {
    fn number(self) -> Option<u32> {
        match self {
            Sender::Host => None,
            Sender::Slot(id) => Some(id.number),
            Sender::Remote { number, .. } => Some(number),
        }
    }
}

/// The bindings of open sessions.
#[derive(Debug, Default)]
pub(crate) struct Bindings {
    /// By session number.
    bound: BTreeMap<u32, Bound>,
    /// Remote sessions that their engines must end: index of the engine, and number of the session.
    pub(crate) endings: VecDeque<(usize, u32)>,
}

#[derive(Debug)]
struct Bound {
    session: Sender,
    /// Number and nonce of the session's client, by the store's region.
    clients: BTreeMap<u32, (u32, u64)>,
    is_fenced: bool,
}

/// A fence in progress.
#[derive(Debug)]
pub(crate) struct Fence {
    pub(crate) region: u32,
    /// The store's id, which distinguishes it from a later store of the same region.
    pub(crate) id: u64,
    pub(crate) nonce: u64,
    /// Tickets that wait for the fence.
    pub(crate) asked: Vec<Ticket>,
    pub(crate) stage: Fencing,
    pub(crate) outcome: Result<(), String>,
}

/// Progress of a fence.
#[derive(Debug)]
pub(crate) enum Fencing {
    /// The nonce is to be recorded.
    Record,
    /// The client's sessions are to end: those whose slots are not marked yet, the turns of those whose slots are
    /// marked, and the numbers of the remote ones.
    End { unmarked: Vec<SessionId>, turns: Grace, remote: Vec<u32> },
}

impl Fencing {
    /// The stage that waits for no session.
    pub(crate) fn nobody() -> Fencing {
        Fencing::End { unmarked: Vec::new(), turns: Grace::default(), remote: Vec::new() }
    }
}

impl Fence {
    pub(crate) fn new(region: u32, id: u64, nonce: u64, ticket: Ticket) -> Fence {
        Fence { region, id, nonce, asked: vec![ticket], stage: Fencing::Record, outcome: Ok(()) }
    }

    /// The sessions for whose turns the fence waits.
    pub(crate) fn waiting_for(&self) -> impl Iterator<Item = SessionId> + '_ {
        let turns = match &self.stage {
            Fencing::Record => None,
            Fencing::End { turns, .. } => Some(turns),
        };
        turns.into_iter().flat_map(Grace::waiting_for)
    }

    /// Makes a step towards the end of the client's sessions. Returns whether it did anything, `None` once no session
    /// of the client runs a chain.
    pub(crate) fn end_step<M: Memory>(
        &mut self,
        memory: &M,
        sessions: &Sessions,
    ) -> Result<Option<bool>, M::Wait> {
        let Fencing::End { unmarked, turns, remote } = &mut self.stage else { return Ok(Some(false)) };
        if let Some(&id) = unmarked.last() {
            if sessions.may_run(id) {
                let turn = Arena::of(memory).fence_session(id.slot)?;
                turns.add(id, turn);
            }
            unmarked.pop();
            return Ok(Some(true));
        }
        let is_over = sessions.is_over(memory, turns)? || mutants::FENCE_WITHOUT_GRACE.is_on();
        Ok(if is_over && !remote.iter().any(|&number| sessions.is_remote(number)) {
            None
        } else {
            Some(false)
        })
    }
}

impl Bindings {
    /// Binds a session to a nonce of the store with this region.
    ///
    /// # Errors
    /// The session has another client's nonce for the store already, or has ended.
    pub(crate) fn bind(
        &mut self,
        sessions: &Sessions,
        sender: Sender,
        region: u32,
        client: (u32, u64),
    ) -> Result<(), String> {
        let is_open = match sender {
            Sender::Host => return Err(NO_SESSION.into()),
            Sender::Slot(id) => sessions.may_run(id),
            Sender::Remote { number, .. } => sessions.is_remote(number),
        };
        let Some(number) = sender.number().filter(|_| is_open) else { return Err(HAS_ENDED.into()) };
        let bound = self.bound.entry(number).or_insert_with(|| Bound {
            session: sender,
            clients: BTreeMap::new(),
            is_fenced: false,
        });
        match *bound.clients.entry(region).or_insert(client) {
            same if same == client => Ok(()),
            (other, _) => Err(format!(
                "the session is bound to client {other} of this store already: open another session for client {}",
                client.0
            )),
        }
    }

    /// Returns a nonce for which `is_recorded`, which takes a region and a nonce, although a session that is bound to
    /// it is not fenced.
    pub(crate) fn unfenced(&self, is_recorded: impl Fn(u32, u64) -> bool) -> Option<u64> {
        let unfenced = self.bound.values().filter(|bound| !bound.is_fenced);
        let mut clients = unfenced.flat_map(|bound| &bound.clients);
        clients.find(|&(&region, &(_, nonce))| is_recorded(region, nonce)).map(|(_, &(_, nonce))| nonce)
    }

    /// Whether the sender's session is fenced: none of its requests may be served.
    pub(crate) fn is_fenced(&self, sender: Sender) -> bool {
        let bound = sender.number().and_then(|number| self.bound.get(&number));
        bound.is_some_and(|bound| bound.is_fenced)
    }

    /// Marks all sessions bound to this nonce for the store with this region as fenced, and requests the end of the
    /// remote ones. Returns the stage of the fence that waits for their ends.
    pub(crate) fn fence(&mut self, region: u32, nonce: u64) -> Fencing {
        let (mut unmarked, mut remote, mut first_engine) = (Vec::new(), Vec::new(), None);
        for bound in self.bound.values_mut() {
            if bound.clients.get(&region).is_none_or(|&(_, of)| of != nonce) {
                continue;
            }
            match bound.session {
                Sender::Host => {}
                Sender::Slot(id) => unmarked.push(id),
                Sender::Remote { engine, number } => {
                    let first_engine = *first_engine.get_or_insert(engine);
                    if mutants::FENCE_MISSES_AN_ENGINE.is_on() && engine != first_engine {
                        continue;
                    }
                    self.endings.push_back((engine, number));
                    remote.push(number);
                }
            }
            bound.is_fenced = true;
        }
        Fencing::End { unmarked, turns: Grace::default(), remote }
    }

    /// Forgets a session that has ended. Returns true if it was fenced, so that it could not retire its buffers.
    pub(crate) fn forget_session(&mut self, number: u32) -> bool {
        self.bound.remove(&number).is_some_and(|bound| bound.is_fenced)
    }

    /// Forgets the clients of a store that is dropped.
    pub(crate) fn forget_store(&mut self, region: u32) {
        self.bound.values_mut().for_each(|bound| bound.clients.retain(|of, _| *of != region));
    }
}

const NO_SESSION: &str =
    "only a client's session can be bound, and this request came from none: send it over a fabric";
const HAS_ENDED: &str = "the session has ended, so it cannot be bound: open another";

/// The refusal of any request of a fenced session.
pub fn fenced_session() -> String {
    format!(
        "{FENCED}: the request was not carried out; discard what this client held, and reconnect as a new client"
    )
}

/// The refusal of a binding to a fenced nonce.
pub(crate) fn fenced_nonce(store: &str) -> String {
    format!(
        "{FENCED}: store '{store}' refuses its nonce for ever, and the session was not bound; discard what this client \
         held, and go on with a new nonce"
    )
}

/// The refusal of a fence for which the store has no more room.
pub(crate) fn too_many_fenced(store: &str) -> String {
    format!(
        "store '{store}' remembers {FENCED_MAX} fenced clients, the maximum, and this one was not fenced: copy the \
         store's data to a new store and drop this one, which forgets them"
    )
}

/// The refusal of a fence that waits for stopped processes.
pub(crate) fn delayed(pids: &BTreeSet<u32>) -> String {
    let pids: Vec<String> = pids.iter().map(u32::to_string).collect();
    format!(
        "the fence is recorded, but process {} is stopped during an operation, which it may still complete: continue \
         or kill it, or serve with --evict-stopped-after to have it killed; then repeat the fence",
        pids.join(", ")
    )
}
