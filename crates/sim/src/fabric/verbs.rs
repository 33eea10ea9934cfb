//! Classic verbs in virtual time: the node's NIC ([`crate::nic`]) executes the ops of a chain, as over `verbs`.
//!
//! A chain is one list on the queue pair of its endpoint, posted with one doorbell. Unlike on a fabric that runs chains
//! in order, two READs of a list may be executed in either order, a READ is a set of snapshots of its lines, and an
//! atomic is atomic to other atomics only. [`farside_remote::Op::fenced`] and awaiting a chain restore the order.
//!
//! Calls, and requests to the node itself, are messages (SEND and RECV) to the node's engine over the same connection.
//! The engine's session grants the keys under which the NIC accesses memory, as a protection domain does. The queue
//! pair lives as long as the session: after the session has ended, no verb takes effect.
//!
//! An access is checked as a memory registration would: the key must be valid and have the right, and all bytes must
//! be in the key's region. The check knows no bounds of buffers.
//!
//! Invariant: a chain with an op that the NIC lacks is refused before its first op.
//!
//! Invariant: once a list is posted, its verbs take effect at most once, whether or not a task still waits for them.

use super::session::{Endpoint, Identity};
use crate::clock::ProcessClock;
use crate::memory::Replay;
use crate::network::HostId;
use crate::nic::{Completion, Connection, Device, ON_CHIP, ON_CHIP_BYTES, Permit, Refusal, Sender, Verb};
use crate::node::{Node, QueuePair};
use crate::world::{MICROS, ProcessId, World, nanos, within};
use farside_node::engine::Guarded;
use farside_remote::address::ON_CHIP_SIZE;
use farside_remote::chain::OpView;
use farside_remote::clock::Clock;
use farside_remote::fabric::{DEADLINE, ServiceId};
use farside_remote::wire::{Code, FENCED, REPLY_BYTES_MAX, flag};
use farside_remote::{
    Addr, Capabilities, Chain, ChainView, Fabric, FabricError, Key, Memory, NodeId, Reply, Rights, Status,
};
use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::pin::pin;
use std::rc::{Rc, Weak};
use std::task::Poll;
use std::time::Duration;

/// Usual time, in nanoseconds, from a client's death until the NIC stops executing the client's verbs, unless the end
/// of the session stops them earlier.
const CUT_AFTER: u64 = MICROS;

/// A client's endpoint whose chains the node's NIC executes.
pub struct Verbs {
    world: World,
    node: NodeId,
    connection: Connection,
    device: Device,
    registration: Registration,
    /// Clock of the client's process, or of the world if no process has opened a session.
    clock: ProcessClock,
    /// Session for calls; `None` if there are none.
    session: Option<Rc<Endpoint>>,
}

/// The memory that a queue pair's lists may access.
#[derive(Clone)]
enum Registration {
    /// All of the node's memory, under any key. Used to test the NIC alone.
    Everything,
    /// The regions of the node's own keys. Used without a session, which would grant keys of its own.
    Node(Rc<Replay>),
    /// The regions of the session's keys, as long as the node's process lives and the session is open.
    Session(Weak<QueuePair>),
}

/// For each region, the secret of the key that last opened the region's words in the NIC's memory.
pub(crate) type OnChipOwners = RefCell<BTreeMap<u32, u64>>;

impl Verbs {
    /// Opens a session with one of the node's engines for `process`, and a queue pair with the node's NIC. The process
    /// runs at `host`; `sender` is the NIC of that host.
    ///
    /// # Errors
    /// The node does not respond, refuses, or has no NIC.
    pub async fn open(
        node: &Node,
        engine: u32,
        process: ProcessId,
        host: HostId,
        clock: &ProcessClock,
        identity: Identity,
        sender: &Rc<Sender>,
    ) -> Result<Rc<Verbs>, FabricError> {
        assert!(node.options().is_reliable, "a queue pair needs a reliable connection");
        let session = Endpoint::open(node, engine, process, host, clock, identity).await?;
        let found = node.serving().and_then(|serving| {
            let pair = serving.queue_pair(identity.identity, identity.incarnation)?;
            let (nic, device) = serving.nic()?;
            let number = serving.next_pair();
            let path = session.addresses();
            let connection = nic.connect_over(node.network(), path, Some((Rc::clone(sender), number)));
            pair.attach(&connection);
            Some((connection, device, Registration::Session(Rc::downgrade(&pair))))
        });
        let Some((connection, device, registration)) = found else {
            let reason = "cannot open a queue pair: the node has no NIC, or was restarted; reconnect";
            return Err(FabricError::Refused(reason.to_owned()));
        };
        let (cut, world) = (connection.clone(), node.world().clone());
        node.world().on_death(process, move || {
            // Packets that have not left the client's NIC are lost, so a list can be cut at any point.
            if world.random().one_in(2) {
                let at = world.now() + world.random().heavy(CUT_AFTER);
                world.at(at, move || cut.close());
            }
        });
        Ok(Rc::new(Verbs {
            world: node.world().clone(),
            node: node.id(),
            connection,
            device,
            registration,
            clock: clock.clone(),
            session: Some(session),
        }))
    }

    /// Creates an endpoint without calls, whose chains may access all of the memory of the connection's NIC.
    pub fn without_calls(world: &World, node: NodeId, connection: Connection, device: Device) -> Verbs {
        let (registration, clock) = (Registration::Everything, ProcessClock::of_world(world));
        Verbs { world: world.clone(), node, connection, device, registration, clock, session: None }
    }

    /// Creates an endpoint without calls, whose chains may access what the node's own keys admit. `memory` is the
    /// node's memory, whose accesses are at one instant.
    pub(crate) fn of_node(
        world: &World,
        node: NodeId,
        connection: Connection,
        device: Device,
        memory: &Rc<Replay>,
    ) -> Verbs {
        let registration = Registration::Node(Rc::clone(memory));
        Verbs { registration, ..Verbs::without_calls(world, node, connection, device) }
    }

    /// Clock of the client's process, or of the world if the endpoint has no session ([`Verbs::without_calls`]).
    pub fn clock(&self) -> &ProcessClock {
        &self.clock
    }

    /// Closes the session and the queue pair after all calls have been answered.
    pub async fn close(&self) {
        if let Some(session) = &self.session {
            session.close().await;
        }
    }

    /// Whether the session is over, so that all further requests fail.
    pub fn is_over(&self) -> bool {
        self.session.as_ref().is_some_and(|session| session.is_over())
    }

    fn check(&self, node: NodeId) -> Result<(), FabricError> {
        if node != self.node {
            return Err(FabricError::NoSuchNode(node));
        }
        match &self.session {
            Some(session) => session.check_open(),
            None => Ok(()),
        }
    }

    /// Translates a chain to verbs, each with whether it is fenced. An op without a verb has its final status.
    fn translate(&self, chain: ChainView<'_>) -> Result<Vec<Step>, FabricError> {
        if let Some(what) = lacking(chain, self.device) {
            return Err(FabricError::Refused(format!(
                "chain refused: the NIC of node {} cannot execute {what}: use a fabric that has {}",
                self.node.0,
                Capabilities::SOFTWARE
            )));
        }
        let mut room = REPLY_BYTES_MAX - 8 * chain.len();
        let mut is_aborted = false;
        let steps = chain.ops().map(|op| {
            if is_aborted {
                return Step::Ended(Status::Aborted);
            }
            let output = match op.code() {
                Code::Read => op.header().len.get() as usize,
                Code::Cas | Code::FetchAdd => 8,
                _ => 0,
            };
            if op.code().is_atomic() && !op.target().raw().is_multiple_of(8) {
                is_aborted = true;
                return Step::Ended(Status::Invalid);
            }
            if output > room {
                return Step::Ended(Status::TooLong);
            }
            room -= output;
            match self.verb(chain.key(), &op) {
                Some(verb) => Step::Posted(verb, op.is_fenced()),
                None => {
                    is_aborted = true;
                    Step::Ended(Status::Access)
                }
            }
        });
        Ok(steps.collect())
    }

    /// Returns the verb of an op, or `None` if the op names words of the NIC that do not exist.
    fn verb(&self, key: Key, op: &OpView<'_>) -> Option<Verb> {
        let len = match op.code() {
            Code::Cas | Code::FetchAdd => 8,
            _ => u64::from(op.header().len.get()),
        };
        let at = match op.target().on_chip_offset() {
            None => op.target().raw(),
            Some(offset) => {
                let first = u64::from(key.region()).checked_mul(ON_CHIP_SIZE)?;
                let is_there = offset.checked_add(len)? <= ON_CHIP_SIZE && first < ON_CHIP_BYTES;
                is_there.then_some(ON_CHIP | (first + offset))?
            }
        };
        let mut operands = op
            .operands()
            .chunks_exact(8)
            .map(|word| u64::from_le_bytes(word.try_into().expect("a word has 8 bytes")));
        let mut operand = || operands.next().expect("the chain is well-formed");
        Some(match op.code() {
            Code::Read => Verb::Read { at, len: len as usize },
            Code::Write => Verb::Write { at, bytes: op.payload().flatten().copied().collect() },
            Code::FetchAdd => Verb::FetchAdd { at, add: operand() },
            Code::Cas => {
                let first = operand();
                let [compare, swap] = if op.has(flag::COMPARE) { [first, operand()] } else { [first; 2] };
                let masks = if op.has(flag::MASKED) { [operand(), operand()] } else { [u64::MAX; 2] };
                Verb::Cas { at, compare, swap, masks }
            }
            Code::Allocate | Code::Retire => unreachable!("the NIC lacks them"),
        })
    }

    /// Waits for the list's last completion, which is the last to arrive.
    async fn completed(&self, last: &Completion) -> Result<(), FabricError> {
        let Some(session) = &self.session else {
            last.complete().await;
            return Ok(());
        };
        let mut complete = pin!(last.complete());
        let mut ended = pin!(session.ended());
        let news = std::future::poll_fn(|cx| match complete.as_mut().poll(cx) {
            Poll::Ready(()) => Poll::Ready(Ok(())),
            Poll::Pending => ended.as_mut().poll(cx).map(Err),
        });
        let deadline = FabricError::Deadline { node: self.node, waited: DEADLINE };
        within(&self.world, nanos(DEADLINE), news).await.unwrap_or(Err(deadline))
    }
}

/// An op of a chain.
enum Step {
    /// The op is posted as this verb, and fenced or not.
    Posted(Verb, bool),
    /// The op is not posted: it ends with this status.
    Ended(Status),
}

impl Registration {
    /// Returns the permit of a list whose ops all run under `key`; `None` if everything is permitted.
    fn permit(&self, key: Key) -> Option<Permit> {
        let pair = match self.clone() {
            Registration::Everything => return None,
            Registration::Node(memory) => {
                return Some(Rc::new(move |at, len, rights| {
                    memory.run_at_once(|memory| match at & ON_CHIP {
                        0 => is_admitted(memory, key, at, len, rights),
                        _ => Ok(memory.admits(key)?.contains(rights)),
                    })
                }));
            }
            Registration::Session(pair) => pair,
        };
        Some(Rc::new(move |at, len, rights| {
            let Some(pair) = pair.upgrade() else { return false };
            let keys = pair.keys().borrow();
            let Some((store, _)) = keys.stands_for(key) else { return false };
            // In a wide region, the engine's locks make words atomic, and the NIC does not know them.
            if keys.is_wide(key) {
                return false;
            }
            let is_admitted = pair.memory().run_at_once(|memory| {
                let seen = Guarded { memory, keys: &keys };
                match at & ON_CHIP {
                    0 => is_admitted(&seen, key, at, len, rights),
                    _ => Ok(seen.admits(key)?.contains(rights)),
                }
            });
            if is_admitted && at & ON_CHIP != 0 {
                pair.own_on_chip(store);
            }
            is_admitted
        }))
    }
}

/// Returns whether a key has the right for all of these bytes of the node's memory.
fn is_admitted<M: Memory>(memory: &M, key: Key, at: u64, len: u64, rights: Rights) -> Result<bool, M::Wait> {
    if !memory.admits(key)?.contains(rights) {
        return Ok(false);
    }
    let mut from = 0;
    while from < len {
        match memory.reach(key.region(), at.wrapping_add(from), len - from)? {
            0 => return Ok(false),
            reached => from += reached,
        }
    }
    Ok(true)
}

/// Returns the first thing that a chain needs and the device lacks, if any.
fn lacking(chain: ChainView<'_>, device: Device) -> Option<String> {
    const PRISM: u8 =
        flag::TARGET_INDIRECT | flag::DATA_INDIRECT | flag::BOUNDED | flag::REDIRECT | flag::RECLAIMING;
    chain.ops().enumerate().find_map(|(place, op)| {
        let header = op.header();
        let what = match op.code() {
            Code::Allocate => Some("ALLOCATE"),
            Code::Retire => Some("RETIRE"),
            // The first op always runs, so its conditional flag has no effect.
            _ if place > 0 && op.has(flag::CONDITIONAL) => Some("a conditional op"),
            _ if header.flags & PRISM != 0 => Some("an op with PRISM's extensions"),
            _ if op.target().scratch_offset().is_some() => Some("an op on scratch"),
            _ if op.target().on_chip_offset().is_some() && !device.has_on_chip_words => {
                Some("an op on its own words, which it lacks")
            }
            Code::Cas if header.width != 8 => Some("a CAS of more than 8 bytes"),
            Code::Cas if header.mode & !FENCED != 0 => Some("a CAS that compares for order"),
            Code::Cas if op.has(flag::MASKED) && !device.has_masked_cas => Some("a masked CAS"),
            _ => None,
        };
        what.map(|what| format!("op {place}, {what}"))
    })
}

/// Builds the reply in wire form from the statuses and outputs of the ops.
fn answer(ops: &[(Status, Vec<u8>)], reply: &mut Reply) {
    let filled = reply.fill(ops.len(), |own| {
        own.clear();
        let mut end = 0;
        for (status, output) in ops {
            end += output.len() as u32;
            own.extend_from_slice(&[*status as u8, 0, 0, 0]);
            own.extend_from_slice(&end.to_le_bytes());
        }
        ops.iter().for_each(|(_, output)| own.extend_from_slice(output));
    });
    filled.expect("the outputs fit the reply: longer READs were not posted");
}

impl Fabric for Verbs {
    async fn run(&self, node: NodeId, chain: &Chain<'_>, reply: &mut Reply) -> Result<(), FabricError> {
        self.check(node)?;
        let view = chain.view();
        let steps = self.translate(view)?;
        chain.note_posted();
        let posted = steps.iter().filter_map(|step| match step {
            Step::Posted(verb, is_fenced) => Some((verb.clone(), *is_fenced)),
            Step::Ended(_) => None,
        });
        let completions = self.connection.post_list(self.registration.permit(view.key()), posted);
        if let Some(last) = completions.last() {
            self.completed(last).await?;
        }
        let mut completions = completions.iter();
        let is_aborted = Cell::new(false);
        let ended = steps.iter().map(|step| {
            let (status, output) = match step {
                Step::Ended(_) if is_aborted.get() => (Status::Aborted, Vec::new()),
                Step::Ended(status) => (*status, Vec::new()),
                Step::Posted(verb, _) => {
                    let completion = completions.next().expect("each posted verb has a completion");
                    match completion.refusal() {
                        Some(Refusal::Access) => (Status::Access, Vec::new()),
                        Some(Refusal::Aborted) => (Status::Aborted, Vec::new()),
                        None => outcome(verb, completion.take()),
                    }
                }
            };
            is_aborted.set(is_aborted.get() || status.aborts() || status == Status::Aborted);
            (status, output)
        });
        answer(&ended.collect::<Vec<_>>(), reply);
        Ok(())
    }

    async fn call(
        &self,
        node: NodeId,
        service: ServiceId,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<(), FabricError> {
        match &self.session {
            Some(session) => session.call(node, service, request, answer).await,
            None => Err(FabricError::Refused("call refused: the endpoint has no session".to_owned())),
        }
    }

    /// Forwards the buffer to the engine, like a call.
    fn retire(&self, node: NodeId, key: Key, buffer: Addr) {
        if let Some(session) = &self.session {
            session.retire(node, key, buffer);
        }
    }

    fn capabilities(&self, _node: NodeId) -> Capabilities {
        let calls = if self.session.is_some() { Capabilities::CALLS } else { Capabilities::NONE };
        calls.and(self.device.capabilities())
    }
}

impl Clock for Verbs {
    fn now(&self) -> Duration {
        self.clock.now()
    }

    fn wall(&self) -> Duration {
        self.clock.wall()
    }

    fn sleep(&self, duration: Duration) -> impl Future<Output = ()> {
        self.clock.sleep(duration)
    }
}

/// Returns the status and the output of an executed verb.
fn outcome(verb: &Verb, result: Vec<u8>) -> (Status, Vec<u8>) {
    let status = match verb {
        Verb::Cas { compare, masks: [compared, _], .. } => {
            let old = u64::from_le_bytes(result[..].try_into().expect("an atomic's result has 8 bytes"));
            if old & compared == compare & compared { Status::Ok } else { Status::CasFailed }
        }
        _ => Status::Ok,
    };
    (status, result)
}
