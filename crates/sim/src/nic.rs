//! A NIC that executes classic verbs on a node's memory without the node's CPU: READ, WRITE, CAS and FETCH-AND-ADD over
//! reliable connections. It gives exactly the guarantees of one-sided RDMA's memory contract:
//!
//! * A READ copies each cache line at one instant. The instants lie anywhere between the READ's start and end, and the
//!   lines can be copied in any order.
//! * A WRITE lands line by line. The lines land in the order of their addresses unless memory is relaxed.
//! * An atomic fetches its word at one time and writes it back later. In between it holds one of the NIC's lock slots,
//!   so it is atomic only with respect to other atomics of that slot. A CAS whose comparison fails writes nothing. A
//!   CAS under masks writes the whole word back: the bits that it does not swap are those that it has fetched.
//! * On one connection, a WRITE is ordered before all later verbs, and an atomic before later READs. All other pairs of
//!   verbs are unordered, unless a fence or a wait for a completion orders them.
//!
//! The device may also have atomic words in its own memory, and a CAS that compares and swaps under masks. Whether a
//! client may use them is decided by the fabric that posts the verbs ([`crate::fabric::verbs`]).
//!
//! The NIC's parts are queues that verbs, and all other requests to the node, share: the two directions of its link,
//! the unit that starts ops, and the lock slots of atomics. A request waits for the requests before it in each part. A
//! fabric that models messages to a CPU, or chains that a NIC's firmware runs, uses the same parts
//! ([`Connection::exchange`], and `fetched`, `locked` and `post` of [`Nic`]).
//!
//! Verbs are posted in lists. A list has a [`Permit`], which the NIC asks at each access: when a verb arrives, and when
//! each of its lines is copied. If a verb is refused on arrival, the later verbs of its list have no effect.
//!
//! Differs from hardware: a refused verb aborts its list, while a real queue pair enters an error state, and its owner
//! must reset it and post the lists after it again.

mod connection;
mod port;
mod sender;

pub use connection::{Completion, Connection, Exchange, Message, Permit, Refusal};
pub use port::{Packets, Port, Posting, Used};
pub use sender::Sender;

use crate::hardware::{ACKNOWLEDGEMENT, OP, framed_in};
use crate::memory::{Bytes, Seen};
use crate::station::{Picos, Station};
use crate::world::{Nanos, World};
use farside_remote::{Capabilities, Rights};
use foldhash::fast::FixedState;
use std::cell::{Cell, Ref, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Bit of the addresses of the NIC's own memory.
pub const ON_CHIP: u64 = 1 << 62;
/// Size of the NIC's own memory in bytes: 256 KiB, as Sherman (SIGMOD 2022) reports for a ConnectX-5.
pub const ON_CHIP_BYTES: u64 = 256 << 10;

/// In place of a connection's number: an atomic that the NIC's firmware executes.
const FIRMWARE: u64 = u64::MAX;

/// Verb that the NIC executes. Its addresses are byte offsets in the node's memory or, with [`ON_CHIP`], in the NIC's
/// own memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verb {
    /// Reads `len` bytes at `at`.
    Read {
        /// Address of the first byte.
        at: u64,
        /// Number of bytes to read.
        len: usize,
    },
    /// Writes `bytes` at `at`.
    Write {
        /// Address of the first byte.
        at: u64,
        /// Bytes to write.
        bytes: Vec<u8>,
    },
    /// Replaces bits of the aligned word at `at` by those of `swap`, if other bits equal those of `compare`.
    Cas {
        /// Address of the word.
        at: u64,
        /// Value that the word must have.
        compare: u64,
        /// Value to store in the word.
        swap: u64,
        /// Bits to compare, then bits to swap. All bits, unless the NIC has masked CAS.
        masks: [u64; 2],
    },
    /// Adds `add` to the aligned word at `at`, wrapping.
    FetchAdd {
        /// Address of the word.
        at: u64,
        /// Number to add to the word.
        add: u64,
    },
}

impl Verb {
    /// Creates a CAS that compares and swaps all bits.
    pub const fn cas(at: u64, compare: u64, swap: u64) -> Verb {
        Verb::Cas { at, compare, swap, masks: [u64::MAX; 2] }
    }

    /// Address and length of the bytes that the verb accesses, and the right that it needs.
    fn access(&self) -> (u64, u64, Rights) {
        match self {
            Verb::Read { at, len } => (*at, *len as u64, Rights::READ),
            Verb::Write { at, bytes } => (*at, bytes.len() as u64, Rights::WRITE),
            Verb::Cas { at, .. } | Verb::FetchAdd { at, .. } => (*at, 8, Rights::ATOMIC),
        }
    }

    /// Name of the verb in the events of packets.
    const fn name(&self) -> &'static str {
        match self {
            Verb::Read { .. } => "read",
            Verb::Write { .. } => "write",
            Verb::Cas { .. } => "cas",
            Verb::FetchAdd { .. } => "fetch-add",
        }
    }

    /// Payload bytes of the verb's request and of its response, without headers.
    pub fn payload(&self) -> [usize; 2] {
        match self {
            Verb::Read { len, .. } => [0, *len],
            Verb::Write { bytes, .. } => [bytes.len(), 0],
            Verb::Cas { .. } => [16, 8],
            Verb::FetchAdd { .. } => [8, 8],
        }
    }

    /// Bytes on the wire of the verb's request and of its response, in packets of at most `packet_max` bytes.
    fn wire_bytes(&self, packet_max: u64) -> [u64; 2] {
        let [request, response] = self.payload();
        [OP + request as u64, ACKNOWLEDGEMENT + response as u64].map(|bytes| framed_in(bytes, packet_max))
    }

    fn is_write(&self) -> bool {
        matches!(self, Verb::Write { .. })
    }
}

/// Durations of a NIC's steps, in nanoseconds if not stated otherwise. A *spread* is the usual length of the random
/// time that is added to a duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Latency from the post of a verb until its arrival, and also from the verb's end until its completion arrives.
    pub flight_ns: Nanos,
    /// Spread of `flight_ns`. Verbs arrive in the order in which they are posted.
    pub flight_spread_ns: Nanos,
    /// Bandwidth of the NIC's link in each direction, in Gb/s. If it is 0, the link takes no time.
    pub link_gbit: u64,
    /// Time, in picoseconds, that the NIC takes to start an op. It starts one op at a time.
    pub op_ps: Picos,
    /// Whether a list of verbs takes the time of one op, whatever its length.
    pub lists_are_ops: bool,
    /// Maximum payload of a packet in bytes.
    pub packet_max: u64,
    /// Time to fetch a line from the node's memory.
    pub fetch_ns: Nanos,
    /// Spread of `fetch_ns`, drawn separately for each line.
    pub fetch_spread_ns: Nanos,
    /// Spread of the time from the landing of a WRITE's line until the next line lands.
    pub land_spread_ns: Nanos,
    /// Time that an atomic takes before it acquires its slot.
    pub atomic_ns: Nanos,
    /// Time that an atomic holds its slot.
    pub slot_ns: Nanos,
    /// Spread of `slot_ns`, drawn for each atomic.
    pub slot_spread_ns: Nanos,
    /// Time of an access to the NIC's own memory. An atomic there holds its slot for this time.
    pub on_chip_ns: Nanos,
    /// Bits of an atomic's address that select its slot, in units of words.
    pub slot_mask: u64,
    /// Whether the lines of a WRITE may land in any order.
    pub relaxed: bool,
}

impl Timing {
    /// Returns the transmission time of `bytes` bytes on the link, in picoseconds.
    const fn wire(&self, bytes: u64) -> Picos {
        match (bytes * 8_000).checked_div(self.link_gbit) {
            Some(picos) => picos,
            None => 0,
        }
    }
}

/// Counters of the traffic on a NIC's link.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Number of requests, each with its response. A list of verbs is one request.
    pub round_trips: u64,
    /// Number of ops that the NIC has started.
    pub ops: u64,
    /// Bytes received, including packet overhead.
    pub bytes_in: u64,
    /// Bytes sent, including packet overhead.
    pub bytes_out: u64,
}

/// A NIC's timing, and what it supports beyond READ, WRITE, CAS and FETCH-ADD of aligned words of 8 bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Durations of the NIC's steps.
    pub timing: Timing,
    /// Whether a CAS can compare and swap under masks.
    pub has_masked_cas: bool,
    /// Whether stores have words in the NIC's own memory.
    pub has_on_chip_words: bool,
}

impl Device {
    /// Capabilities of the device, without those of the node's CPU.
    pub const fn capabilities(self) -> Capabilities {
        let none = Capabilities::NONE;
        let masked = if self.has_masked_cas { Capabilities::MASKED_CAS } else { none };
        let on_chip = if self.has_on_chip_words { Capabilities::ON_CHIP_WORDS } else { none };
        Capabilities::WHOLE_LINES.and(masked).and(on_chip)
    }
}

/// Start and end of an interval in which a lock slot is held.
type Held = (Nanos, Nanos);

/// NIC of a node. Clones refer to the same NIC.
#[derive(Clone)]
pub struct Nic(Rc<Inner>);

struct Inner {
    world: World,
    /// The node's memory; `None` once the NIC was stopped.
    bytes: RefCell<Option<Rc<Bytes>>>,
    timing: Timing,
    /// The two directions of the link.
    incoming: Station,
    outgoing: Station,
    /// The unit that starts ops.
    ops: Station,
    /// For each lock slot, the intervals in which atomics hold it, in order. No two of them overlap.
    slots: RefCell<HashMap<u64, VecDeque<Held>, FixedState>>,
    /// The NIC's own memory; empty until it is used.
    on_chip: RefCell<Vec<u8>>,
    seen: RefCell<Option<Rc<Cell<Seen>>>>,
    traffic: Cell<Traffic>,
    /// Number of connections opened so far.
    connections: Cell<u64>,
    director: RefCell<Option<Director>>,
    watcher: RefCell<Option<Watcher>>,
}

/// Step of a verb, with the address of the bytes that it accesses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step {
    /// A READ fetches a line.
    Fetch(u64),
    /// A line of a WRITE lands, after the line before it.
    Land(u64),
    /// An atomic fetches its word.
    Lock(u64),
    /// An atomic writes its word back, and releases its slot.
    WriteBack(u64),
}

impl Step {
    /// Address of the first byte that the step accesses.
    pub const fn at(self) -> u64 {
        match self {
            Step::Fetch(at) | Step::Land(at) | Step::Lock(at) | Step::WriteBack(at) => at,
        }
    }
}

/// Step of a verb that has just accessed memory. See [`Nic::watch`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Effect {
    /// Number of the verb's connection; see [`Connection::number`].
    pub connection: u64,
    /// Number of the verb: the number of verbs that arrived on this connection before it.
    pub verb: u64,
    /// The step. An atomic that leaves its word unchanged has no [`Step::WriteBack`].
    pub step: Step,
    /// Number of bytes accessed. Adjacent lines that are accessed at the same instant are one effect.
    pub len: usize,
}

/// Returns the time, in nanoseconds, by which a connection's step is late. See [`Nic::direct`].
type Director = Box<dyn FnMut(u64, Step) -> Nanos>;

/// Is told each effect. See [`Nic::watch`].
type Watcher = Box<dyn FnMut(Effect)>;

impl Nic {
    /// Creates a NIC that serves `bytes`.
    pub fn new(world: &World, bytes: &Rc<Bytes>, timing: Timing) -> Nic {
        Nic(Rc::new(Inner {
            world: world.clone(),
            bytes: RefCell::new(Some(Rc::clone(bytes))),
            timing,
            incoming: Station::new(1),
            outgoing: Station::new(1),
            ops: Station::new(1),
            slots: RefCell::default(),
            on_chip: RefCell::default(),
            seen: RefCell::new(None),
            traffic: Cell::default(),
            connections: Cell::new(0),
            director: RefCell::default(),
            watcher: RefCell::default(),
        }))
    }

    /// Lets `late` decide by how many nanoseconds each step is late, in place of a random draw. The NIC asks when a
    /// verb arrives. So a test can choose a schedule; it is always one that the memory contract allows.
    pub fn direct(&self, mut late: impl FnMut(Step) -> Nanos + 'static) {
        self.direct_each(move |_connection, step| late(step));
    }

    /// Does what [`Nic::direct`] does, and tells `late` the number of the connection, too.
    pub fn direct_each(&self, late: impl FnMut(u64, Step) -> Nanos + 'static) {
        *self.0.director.borrow_mut() = Some(Box::new(late));
    }

    /// Calls `see` for each access of a verb to memory, right after the access. `see` must not post verbs.
    pub fn watch(&self, see: impl FnMut(Effect) + 'static) {
        *self.0.watcher.borrow_mut() = Some(Box::new(see));
    }

    fn tell(&self, effect: Effect) {
        if let Some(see) = &mut *self.0.watcher.borrow_mut() {
            see(effect);
        }
    }

    /// Durations of the NIC's steps.
    pub fn timing(&self) -> &Timing {
        &self.0.timing
    }

    /// Returns the traffic on the NIC's link since its creation.
    pub fn traffic(&self) -> Traffic {
        self.0.traffic.get()
    }

    /// Makes the NIC count its accesses and torn READs in `seen`.
    pub fn count_in(&self, seen: &Rc<Cell<Seen>>) {
        *self.0.seen.borrow_mut() = Some(Rc::clone(seen));
    }

    /// Stops the NIC, as the death of the node's process does: no later effect takes place. Frees the node's memory,
    /// which the connections of clients may outlive.
    pub fn stop(&self) {
        self.0.bytes.take();
    }

    fn is_stopped(&self) -> bool {
        self.0.bytes.borrow().is_none()
    }

    /// The node's memory.
    ///
    /// # Panics
    /// If the NIC was stopped.
    fn bytes(&self) -> Ref<'_, Bytes> {
        Ref::map(self.0.bytes.borrow(), |bytes| bytes.as_deref().expect("a stopped NIC accesses no memory"))
    }

    /// Fills `len` bytes of the NIC's own memory with zeros, from byte `at` on.
    pub(crate) fn clear_on_chip(&self, at: u64, len: u64) {
        self.poke(ON_CHIP | at, &vec![0; len as usize]);
    }

    fn peek(&self, at: u64, out: &mut [u8]) {
        self.count_access();
        if at & ON_CHIP == 0 {
            return self.bytes().peek(at, out);
        }
        let at = (at & !ON_CHIP) as usize;
        out.copy_from_slice(&self.on_chip()[at..at + out.len()]);
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        self.count_access();
        if at & ON_CHIP == 0 {
            return self.bytes().poke(at, bytes);
        }
        let at = (at & !ON_CHIP) as usize;
        self.on_chip()[at..at + bytes.len()].copy_from_slice(bytes);
    }

    fn on_chip(&self) -> std::cell::RefMut<'_, Vec<u8>> {
        let mut on_chip = self.0.on_chip.borrow_mut();
        on_chip.resize(ON_CHIP_BYTES as usize, 0);
        on_chip
    }

    fn count_access(&self) {
        self.count(|seen| seen.accesses += 1);
    }

    fn count(&self, add: impl FnOnce(&mut Seen)) {
        if let Some(seen) = &*self.0.seen.borrow() {
            let mut counted = seen.get();
            add(&mut counted);
            seen.set(counted);
        }
    }

    fn spread(&self, ns: Nanos) -> Nanos {
        if ns == 0 { 0 } else { self.0.world.random().heavy(ns) }
    }

    /// Returns by how many nanoseconds a step of a connection is late. `ns` is the usual time.
    fn late(&self, connection: u64, step: Step, ns: Nanos) -> Nanos {
        match &mut *self.0.director.borrow_mut() {
            Some(late) => late(connection, step),
            None => self.spread(ns),
        }
    }

    /// Draws the latency of a message between a client's NIC and this one.
    fn flight(&self) -> Nanos {
        self.0.timing.flight_ns + self.spread(self.0.timing.flight_spread_ns)
    }

    /// Receives a request that now reaches the NIC's link. Returns the virtual time at which the NIC has started the
    /// last of its ops. Requests leave the link in the order in which they arrive, so the unit that starts ops is
    /// asked in advance.
    fn receive(&self, bytes: u64, ops: u64) -> Nanos {
        let Inner { world, timing, incoming, ops: starts, traffic, .. } = &*self.0;
        let counted = traffic.get();
        traffic.set(Traffic { bytes_in: counted.bytes_in + bytes, ops: counted.ops + ops, ..counted });
        starts.pass(incoming.pass(world.now(), timing.wire(bytes)), ops * timing.op_ps)
    }

    /// Sends a response. Returns the virtual time at which its last byte has left. `ends` tells whether it is the last
    /// response to a request.
    fn respond(&self, bytes: u64, ends: bool) -> Nanos {
        let Inner { world, timing, outgoing, traffic, .. } = &*self.0;
        let counted = traffic.get();
        let round_trips = counted.round_trips + u64::from(ends);
        traffic.set(Traffic { bytes_out: counted.bytes_out + bytes, round_trips, ..counted });
        outgoing.pass(world.now(), timing.wire(bytes))
    }

    /// Returns the virtual time at which a read of the node's memory that starts at `from` returns.
    pub(crate) fn fetched(&self, from: Nanos) -> Nanos {
        from + self.0.timing.fetch_ns + self.spread(self.0.timing.fetch_spread_ns)
    }

    /// Reserves the lock slot of the word at `at` for a firmware atomic that starts at `from`. Returns the
    /// virtual times at which the atomic fetches the word, and writes the word back and releases the slot.
    pub(crate) fn locked(&self, at: u64, from: Nanos) -> [Nanos; 2] {
        self.locked_by(FIRMWARE, at, from)
    }

    /// Does what [`Nic::locked`] does, for an atomic of the connection with this number.
    fn locked_by(&self, connection: u64, at: u64, from: Nanos) -> [Nanos; 2] {
        let Inner { world, timing, slots, .. } = &*self.0;
        let mut slots = slots.borrow_mut();
        let is_on_chip = at & ON_CHIP != 0;
        let slot = if is_on_chip { at } else { (at & timing.slot_mask) / 8 };
        let held = slots.entry(slot).or_default();
        while held.front().is_some_and(|&(_, to)| to < world.now()) {
            held.pop_front();
        }
        let until_slot = if is_on_chip { 0 } else { timing.atomic_ns };
        let mut fetch = from + until_slot + self.late(connection, Step::Lock(at), timing.fetch_spread_ns);
        let holds = if is_on_chip { timing.on_chip_ns } else { timing.slot_ns };
        let length = holds + self.late(connection, Step::WriteBack(at), timing.slot_spread_ns);
        // An atomic that arrives later may hold the slot earlier, if its interval fits in a gap.
        let mut place = held.partition_point(|&(_, to)| to <= fetch);
        while let Some(&(_, to)) = held.get(place).filter(|(from, _)| *from <= fetch + length) {
            fetch = to;
            place += 1;
        }
        let back = fetch + length;
        held.insert(place, (fetch, back));
        [fetch, back]
    }

    /// Makes the NIC write to the node's memory, this many times. The writes are posted, so nothing waits for them.
    pub(crate) fn post(&self, writes: u64) {
        self.0.ops.pass(self.0.world.now(), writes * self.0.timing.op_ps);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::hardware::{INPUTS, Testbed, answer_len, op_len};
    use crate::world::SECONDS;

    const AT: u64 = 1 << 20;

    fn nic() -> (World, Nic) {
        let world = World::new(1);
        let nic = Nic::new(&world, &Rc::new(Bytes::new(8 << 20)), INPUTS.timing(Testbed::PRISM_MICRO));
        (world, nic)
    }

    /// Returns the latency of a verb in nanoseconds.
    fn latency(world: &World, nic: &Nic, verb: Verb) -> Nanos {
        let (connection, since) = (nic.connect(), world.now());
        let done = world.complete(SECONDS, async move { connection.post(verb, false).complete().await });
        assert_eq!(done, Some(()));
        world.now() - since
    }

    #[test]
    fn a_verb_waits_for_the_messages_before_it_on_the_link() {
        let (world, nic) = nic();
        let read = || Verb::Read { at: AT, len: 8 };
        let alone = latency(&world, &nic, read());
        let message = Message { bytes: 1_000_000, ops: 1, extra_ns: 0 };
        let (connection, theirs) = (nic.connect(), world.clone());
        world.spawn(world.start_process(), async move {
            connection.exchange(message, || (theirs.now(), 64)).await;
        });
        let behind = latency(&world, &nic, read());
        let transmission = 1_000_000 * 8 / Testbed::PRISM_MICRO.link_gbit;
        assert!(
            (transmission..transmission + 100).contains(&(behind - alone)),
            "{alone} ns, then {behind} ns"
        );
        world.run_until(SECONDS);
        let Traffic { round_trips, ops, bytes_in, bytes_out } = nic.traffic();
        assert_eq!((round_trips, ops, bytes_in), (3, 3, 1_000_000 + 2 * op_len(0, 0)));
        assert_eq!(bytes_out, 64 + 2 * answer_len(8));
    }

    #[test]
    fn posted_writes_and_atomics_of_the_firmware_occupy_the_parts_that_verbs_use() {
        let (world, nic) = nic();
        let read = || Verb::Read { at: AT, len: 8 };
        let alone = latency(&world, &nic, read());
        // They occupy the NIC for longer than a READ takes to reach it.
        nic.post(1_000);
        let behind = latency(&world, &nic, read());
        let busy = 1_000 * INPUTS.nic_op_ps / 1_000;
        assert!(behind > alone && behind < alone + busy, "{alone} ns, then {behind} ns");
        let alone = latency(&world, &nic, Verb::cas(AT, 0, 1));
        let [fetch, back] = nic.locked(AT, world.now() + INPUTS.verb_ns / 2);
        assert_eq!(back - fetch, INPUTS.slot_ns);
        let same_slot = latency(&world, &nic, Verb::cas(AT + 4_096, 0, 1));
        assert!(same_slot > alone, "{alone} ns, then {same_slot} ns");
        let _ = nic.locked(AT, world.now() + INPUTS.verb_ns / 2);
        assert_eq!(latency(&world, &nic, Verb::cas(AT + 8, 0, 1)), alone, "another slot");
    }
}
