//! The family of guarded objects. Each object of a store is a counter, which clients change under leased locks.
//!
//! The tasks of a session share one client of the system, which a task of its own keeps. A session that is lost ends
//! its client: the next session has another client, with another nonce. So a process that was paused for longer than
//! its lease learns that it was fenced, and goes on as a new client.
//!
//! Invariant: an addition without a known outcome never ends in the history. A recovery may carry it out at any later
//! time, also after its client's death.

use crate::family::{Failure, FailureKind, Family, Seat};
use crate::flight::{Phase, Phases, Request, Tracked};
use crate::systems::System;
use crate::{Choice, Drawn, Scene};
use farside_remote::control;
use farside_remote::fabric::Ran;
use farside_remote::wire::{Code, OpHeader};
use farside_remote::{ChainView, NodeId, Width};
use farside_sim::counter::Counters;
use farside_sim::history::counter::{Ask, Outcome, Value};
use farside_sim::node::Node;
use farside_sim::random::Random;
use farside_sim::world::{MICROS, Turnstile};
use farside_systems::guarded::{self, GuardedError, GuardedKind, Spec};
use farside_systems::lease::LeaseError;
use farside_systems::redo::RedoError;
use farside_systems::store;
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::rc::Rc;

/// Guarded objects, with the options that a seed has drawn for them.
pub(crate) struct Guarded {
    spec: Spec,
    /// Number of sessions that each client has with a node.
    sessions: u32,
}

/// One in this many operations is followed by the recovery of all dead clients.
const HEAL_ONE_IN: u64 = 40;
/// One in this many operations is the last one of its client.
const LEAVE_ONE_IN: u64 = 40;

type Client = Rc<guarded::Guarded<Tracked>>;

/// The system's clients over one session: one for each store, by the store's name.
#[derive(Default)]
pub(crate) struct Shared {
    /// Lets one task at a time open a store.
    gate: Turnstile,
    clients: RefCell<BTreeMap<String, Client>>,
    /// Number of clients whose tasks have not ended.
    kept: Rc<Cell<u32>>,
}

/// Indices of the phases. The idle phase is the first.
const READ: usize = 1;
const TAKE_LOCK: usize = 2;
const UPDATE: usize = 3;
const WATCH: usize = 4;
const TOKENS: usize = 5;
const CLAIM: usize = 6;
const RENEW: usize = 7;
const FREE_ID: usize = 8;
const BIND: usize = 9;
const FENCE: usize = 10;
const INSPECT: usize = 11;
const REDO: usize = 12;
const FREE_LOCK: usize = 13;
const CATALOG: usize = 14;

/// The phases are in the order of the constants.
static PHASES: Phases = Phases {
    all: &[
        Phase::new("idle").rare(),
        Phase::new("read"),
        Phase::new("take lock"),
        Phase::new("update"),
        Phase::new("watch"),
        Phase::new("tokens").rare(),
        Phase::new("claim").rare(),
        Phase::new("renew"),
        Phase::new("free id").rare(),
        Phase::new("bind").rare(),
        Phase::new("fence").rare(),
        Phase::new("inspect").rare(),
        Phase::new("redo").rare().led_to_by(UPDATE),
        Phase::new("free lock").rare(),
        Phase::new("catalog").rare(),
    ],
    of: |request, _| match request {
        Request::Call(_, request) => match serde_json::from_slice(request) {
            Ok(control::Ask::Bind { .. }) => BIND,
            Ok(control::Ask::Fence { .. }) => FENCE,
            _ => CATALOG,
        },
        Request::Chain(chain) => phase_of(chain),
    },
};

/// Returns the phase of a chain, by its ops. A read of an entry belongs to the watch of a lease; reads of locks and of
/// records belong to the inspection of a dead client. An id is freed by its holder, too.
fn phase_of(chain: ChainView<'_>) -> usize {
    let ops: Vec<(Code, &OpHeader)> = chain.ops().map(|op| (op.code(), op.header())).collect();
    let swap = chain.ops().find(|op| op.code() == Code::Cas);
    match (&ops[..], swap) {
        ([(Code::FetchAdd, _)], _) => TOKENS,
        ([(Code::Cas, header)], Some(swap)) if header.width == 16 => {
            let is_free = |entry: &[u8]| entry.iter().take(8).all(|&byte| byte == 0);
            let (found, new) = swap.operands().split_at(16);
            match (is_free(found), is_free(new)) {
                (_, true) => FREE_ID,
                (true, _) => CLAIM,
                (false, _) if found[..8] != new[..8] => CLAIM,
                (false, _) => RENEW,
            }
        }
        ([(Code::Cas, _)], _) => FREE_LOCK,
        ([(Code::Cas, _), (Code::Read, _)], _) => TAKE_LOCK,
        ([(Code::Write, _), (Code::Write, _), (Code::Cas, _)], _) => UPDATE,
        (_, Some(_)) => REDO,
        ([(_, entry)], None) if entry.len.get() == 16 => WATCH,
        ([_, (_, entry)], None) if entry.len.get() == 16 => WATCH,
        ([_, (_, content)], None) if content.len.get() > 16 => READ,
        _ => INSPECT,
    }
}

impl Family for Guarded {
    type Ask = Ask;
    type Client = Client;
    type Shared = Shared;
    type Checker = Counters;

    fn drawn(_system: System, drawn: &Drawn, random: &Random) -> Guarded {
        let spec = Spec {
            // More than one chain of a recovery reads, if the trial is crowded.
            objects: drawn.keys.min(40),
            len: [24, 64, 200, 1000][random.below(4) as usize],
            // If there are as many ids as clients, a client that restarts takes over the id of a dead one.
            ids: random.between(u64::from(drawn.clients), 2 * u64::from(drawn.clients)) as u16,
            lanes: random.between(1, 3) as u16,
            lease_us: random.between(5_000, 20_000),
        };
        Guarded { spec, sessions: if random.one_in(4) { 1 } else { 2 } }
    }

    fn is_owned(&self) -> bool {
        true
    }

    fn sessions(&self) -> u32 {
        self.sessions
    }

    fn long_pause_one_in(&self, random: &Random) -> u64 {
        random.between(2, 4)
    }

    fn options(&self) -> Vec<Choice> {
        let Spec { len, ids, lanes, lease_us, .. } = self.spec;
        let sessions = self.sessions;
        vec![
            Choice::new("object_bytes", len, format!("object size {len}")),
            Choice::new("ids", ids, format!("ids {ids}")),
            Choice::new("lanes", lanes, format!("lanes {lanes}")),
            Choice::new("lease_us", lease_us, format!("lease {lease_us} us")),
            Choice::new("sessions_each", sessions, format!("sessions of each client {sessions}")),
        ]
    }

    fn parameters(&self) -> String {
        serde_json::to_string(&self.spec).expect("plain data")
    }

    /// Although clients use chains only, an operation does not end with its session: others may redo it.
    fn is_one_sided(&self) -> bool {
        false
    }

    fn phases(_system: System) -> &'static Phases {
        &PHASES
    }

    fn checker(&self) -> Counters {
        Counters
    }

    async fn open(&self, seat: Seat<'_, Guarded>, node: NodeId, name: &str) -> Result<Client, Failure> {
        let Seat { scene, site, process, fabrics, shared, .. } = seat;
        let _passage = shared.gate.enter().await;
        if let Some(client) = shared.clients.borrow().get(name) {
            return Ok(Rc::clone(client));
        }
        let mut sessions = Vec::new();
        for fabric in fabrics {
            sessions.push(store::open::<GuardedKind, _>(fabric, node, name).await?);
        }
        let nonce = NonZeroU64::new(scene.world.random().bits() | 1).expect("it is odd");
        let client = guarded::Guarded::open(sessions, nonce).await?;
        // The client's operations may be over before it could do any harm.
        if let Err(violation) = site.node.check_bindings() {
            return Err(Failure { ran: Ran::No, kind: FailureKind::Wrong, message: violation });
        }
        let (kept, keeping) = (Rc::clone(&shared.kept), Rc::clone(&client));
        kept.set(kept.get() + 1);
        scene.world.spawn(process, async move {
            keeping.keep().await;
            kept.set(kept.get() - 1);
        });
        shared.clients.borrow_mut().insert(name.to_owned(), Rc::clone(&client));
        Ok(client)
    }

    async fn leave(&self, scene: &Scene, shared: &Shared) {
        shared.clients.borrow().values().for_each(|client| client.close());
        while shared.kept.get() > 0 {
            scene.world.sleep(20 * MICROS).await;
        }
    }

    fn draw(&self, scene: &Scene, _client: &mut Client) -> (u64, Ask) {
        let random = scene.world.random();
        let object = random.below(self.spec.objects);
        (object, if random.one_in(3) { Ask::Read } else { Ask::Add(scene.next_tag()) })
    }

    async fn perform(
        &self,
        _scene: &Scene,
        client: &mut Client,
        _who: u32,
        key: u64,
        ask: &Ask,
    ) -> Result<Outcome, Failure> {
        let guarded::Value { count, tag } = match *ask {
            Ask::Add(tag) => client.add(key, tag).await?,
            Ask::Read => client.read(key).await?,
        };
        Ok(Outcome::Found(Value { count, tag }))
    }

    /// At times recovers the dead clients that are in nobody's way, or closes the client, which then releases its
    /// lease.
    async fn trespass(&self, scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        let random = scene.world.random();
        if random.one_in(HEAL_ONE_IN) {
            client.heal().await?;
        }
        if random.one_in(LEAVE_ONE_IN) {
            client.close();
            return Err(GuardedError::Closed.into());
        }
        Ok(())
    }

    /// Adds to each object: no lock of a dead client may be in the way.
    fn read_all(&self, scene: &Scene) -> Vec<(u64, Ask)> {
        (0..self.spec.objects)
            .flat_map(|object| [(object, Ask::Add(scene.next_tag())), (object, Ask::Read)])
            .collect()
    }

    async fn heal(&self, _scene: &Scene, client: &mut Client) -> Result<(), Failure> {
        Ok(client.heal().await?)
    }

    /// Checks that nobody holds an id or a lock. All clients are dead, except one that has healed the store and left.
    async fn audit(&self, _scene: &Scene, node: &Node, store: &str) -> Result<(), String> {
        let found = node.answer(control::Ask::OpenStore { name: store.to_owned() }).await?;
        let control::Answer::Store(store) = found else { return Err(format!("{found:?}")) };
        let memory = node.memory();
        let (ids, locks) = guarded::held(&store, |at| memory.load(at, Width::W8) as u64)
            .map_err(|error| error.to_string())?;
        if ids.is_empty() && locks.is_empty() {
            return Ok(());
        }
        Err(format!("after all dead clients were recovered, ids {ids:?} and the locks of {locks:?} are held"))
    }
}

impl From<GuardedError> for Failure {
    fn from(error: GuardedError) -> Failure {
        let message = error.to_string();
        let kind = match &error {
            GuardedError::Busy => FailureKind::Declined,
            GuardedError::Refused(status)
            | GuardedError::Unsettled(status)
            | GuardedError::Lease(LeaseError::Refused(status))
            | GuardedError::Redo(RedoError::Refused(status)) => {
                let message = format!("a client was denied an access that it is allowed: {status}");
                return Failure { ran: error.ran(), kind: FailureKind::Refused, message };
            }
            GuardedError::Damaged(_) | GuardedError::Redo(RedoError::Damaged | RedoError::NoTokens) => {
                FailureKind::Wrong
            }
            _ => FailureKind::Over,
        };
        Failure { ran: error.ran(), kind, message }
    }
}
