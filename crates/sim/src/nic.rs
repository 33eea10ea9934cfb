//! A NIC that executes classic verbs on a node's memory without the node's CPU: READ, WRITE, CAS and FETCH-AND-ADD over
//! reliable connections. It gives exactly the guarantees of one-sided RDMA's memory contract:
//!
//! * A READ copies each cache line at one instant. The instants lie anywhere between the READ's start and end, and the
//!   lines can be copied in any order.
//! * A WRITE lands line by line. The lines land in the order of their addresses unless memory is relaxed.
//! * An atomic fetches its word at one time and writes it back later. In between it holds one of the NIC's lock slots,
//!   so it is atomic only with respect to other atomics of that slot. A CAS whose comparison fails writes nothing.
//! * On one connection, a WRITE is ordered before all later verbs, and an atomic before later READs. All other pairs of
//!   verbs are unordered, unless a fence or a wait for a completion orders them.
//!
//! The device may also have atomic words in its own memory, and a CAS that compares and swaps under masks. Whether a
//! client may use them is decided by the fabric that posts the verbs ([`crate::fabric::verbs`]).
//!
//! Verbs are posted in lists. A list has a [`Permit`], which the NIC asks at each access: when a verb arrives, and when
//! each of its lines is copied. If a verb is refused on arrival, the later verbs of its list have no effect.
//!
//! Differs from hardware: a refused verb aborts its list, while a real queue pair enters an error state, and its owner
//! must reset it and post the lists after it again.
//!
//! Invariant: the times of all effects of a verb are fixed when it arrives, so later arrivals cannot change them. Once
//! a connection is closed or the NIC is stopped, no later effect takes place.

use crate::memory::{Bytes, LINE, Seen};
use crate::network::{Address, Network};
use crate::station::Sender;
use crate::world::{Bell, Nanos, World};
use farside_remote::{Capabilities, Rights};
use foldhash::fast::FixedState;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Bit of the addresses of the NIC's own memory.
pub const ON_CHIP: u64 = 1 << 62;
/// Size of the NIC's own memory in bytes: 256 KiB, as Sherman (SIGMOD 2022) reports for a ConnectX-5.
pub const ON_CHIP_BYTES: u64 = 256 << 10;

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

    fn is_write(&self) -> bool {
        matches!(self, Verb::Write { .. })
    }
}

/// Durations of a NIC's steps, in nanoseconds. A *spread* is the usual length of the random time that is added to a
/// duration.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// Latency from the post of a verb until its arrival, and also from the verb's end until its completion arrives.
    pub flight_ns: Nanos,
    /// Spread of `flight_ns`. Verbs arrive in the order in which they are posted.
    pub flight_spread_ns: Nanos,
    /// Time that the NIC is busy with a verb before the next one can start.
    pub service_ns: Nanos,
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
        masked.and(if self.has_on_chip_words { Capabilities::ON_CHIP_WORDS } else { none })
    }
}

/// Start and end of an interval in which a lock slot is held.
type Held = (Nanos, Nanos);

/// NIC of a node. Clones refer to the same NIC.
#[derive(Clone)]
pub struct Nic(Rc<Inner>);

struct Inner {
    world: World,
    bytes: Rc<Bytes>,
    timing: Timing,
    /// Virtual time until which the NIC is busy with earlier verbs.
    busy: Cell<Nanos>,
    /// For each lock slot, the intervals in which atomics hold it.
    slots: RefCell<HashMap<u64, Vec<Held>, FixedState>>,
    /// The NIC's own memory; empty until it is used.
    on_chip: RefCell<Vec<u8>>,
    is_stopped: Cell<bool>,
    seen: RefCell<Option<Rc<Cell<Seen>>>>,
}

/// Whether a list may access `len` bytes at `at` now, given the right that the access needs.
pub type Permit = Rc<dyn Fn(u64, u64, Rights) -> bool>;

/// Reason why a verb had no effect, or only a part of its effect.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Refusal {
    /// The list's permit refused an access of the verb.
    Access,
    /// An earlier verb of the list was refused.
    Aborted,
}

/// Verbs that are posted together.
struct List {
    permit: Option<Permit>,
    is_refused: Cell<bool>,
}

impl List {
    fn permits(&self, at: u64, len: u64, rights: Rights) -> bool {
        len == 0 || self.permit.as_ref().is_none_or(|permit| permit(at, len, rights))
    }
}

impl Nic {
    /// Creates a NIC that serves `bytes`.
    pub fn new(world: &World, bytes: &Rc<Bytes>, timing: Timing) -> Nic {
        Nic(Rc::new(Inner {
            world: world.clone(),
            bytes: Rc::clone(bytes),
            timing,
            busy: Cell::new(0),
            slots: RefCell::default(),
            on_chip: RefCell::default(),
            is_stopped: Cell::new(false),
            seen: RefCell::new(None),
        }))
    }

    /// Makes the NIC count its accesses and torn READs in `seen`.
    pub fn count_in(&self, seen: &Rc<Cell<Seen>>) {
        *self.0.seen.borrow_mut() = Some(Rc::clone(seen));
    }

    /// Stops the NIC, as the death of the node's process does: no later effect takes place.
    pub fn stop(&self) {
        self.0.is_stopped.set(true);
    }

    /// Fills `len` bytes of the NIC's own memory with zeros, from byte `at` on.
    pub(crate) fn clear_on_chip(&self, at: u64, len: u64) {
        self.poke(ON_CHIP | at, &vec![0; len as usize]);
    }

    fn peek(&self, at: u64, out: &mut [u8]) {
        self.count_access();
        if at & ON_CHIP == 0 {
            return self.0.bytes.peek(at, out);
        }
        let at = (at & !ON_CHIP) as usize;
        out.copy_from_slice(&self.on_chip()[at..at + out.len()]);
    }

    fn poke(&self, at: u64, bytes: &[u8]) {
        self.count_access();
        if at & ON_CHIP == 0 {
            return self.0.bytes.poke(at, bytes);
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

    /// Opens a connection (a queue pair) to the NIC.
    pub fn connect(&self) -> Connection {
        self.connected(None, None)
    }

    /// Opens a connection whose packets pass over the network's connection from `client` to `node`, with its delays
    /// and faults. The latency of [`Timing::flight_ns`] does not apply.
    pub fn connect_over(
        &self,
        network: &Network,
        [client, node]: [Address; 2],
        sender: Option<(Rc<Sender>, u32)>,
    ) -> Connection {
        self.connected(sender, Some(Path { network: network.clone(), client, node }))
    }

    /// Opens a connection to the NIC from a machine whose connections share the NIC `sender`. `number` identifies this
    /// connection at `sender`.
    pub fn connect_from(&self, sender: &Rc<Sender>, number: u32) -> Connection {
        self.connected(Some((Rc::clone(sender), number)), None)
    }

    fn connected(&self, sender: Option<(Rc<Sender>, u32)>, path: Option<Path>) -> Connection {
        Connection(Rc::new(Pair {
            nic: self.clone(),
            sender,
            path,
            is_closed: Cell::new(false),
            unwritten: RefCell::default(),
            held: RefCell::default(),
            outstanding: RefCell::default(),
            arrives: Cell::new(0),
            completes: Cell::new(0),
            landed: Cell::new(0),
            written_back: Cell::new(0),
        }))
    }

    fn spread(&self, ns: Nanos) -> Nanos {
        if ns == 0 { 0 } else { self.0.world.random().heavy(ns) }
    }

    /// Returns the virtual time at which the NIC starts to work on a verb that arrives now.
    fn served(&self, now: Nanos) -> Nanos {
        let at = self.0.busy.get().max(now);
        self.0.busy.set(at + self.0.timing.service_ns);
        at
    }
}

/// Reliable connection between a client and a NIC.
#[derive(Clone)]
pub struct Connection(Rc<Pair>);

/// Path of a connection's packets through the network.
struct Path {
    network: Network,
    client: Address,
    node: Address,
}

/// Word that an atomic is to write back, if it changes the word.
type Unwritten = Rc<Cell<Option<u64>>>;

/// A verb of a list that was posted.
struct Posted {
    verb: Verb,
    is_fenced: bool,
    list: Rc<List>,
    completion: Completion,
}

struct Pair {
    nic: Nic,
    /// The NIC that sends posted verbs, and the number of this connection at that NIC.
    sender: Option<(Rc<Sender>, u32)>,
    path: Option<Path>,
    is_closed: Cell<bool>,
    /// Address and new value of each atomic that has fetched its word and not written it back.
    unwritten: RefCell<Vec<(u64, Unwritten)>>,
    /// Posted verbs that wait for a fence, in order.
    held: RefCell<VecDeque<Posted>>,
    /// Completions of the READs and atomics that are in flight.
    outstanding: RefCell<Vec<Completion>>,
    /// Virtual time at which the last sent verb arrives.
    arrives: Cell<Nanos>,
    /// Virtual time at which the last completion arrives.
    completes: Cell<Nanos>,
    /// Virtual times at which the last arrived WRITE has landed (`landed`), and the last arrived atomic has written
    /// back (`written_back`).
    landed: Cell<Nanos>,
    written_back: Cell<Nanos>,
}

/// Completion of a posted verb.
#[derive(Clone, Default)]
pub struct Completion(Rc<Completed>);

#[derive(Default)]
struct Completed {
    answer: RefCell<Vec<u8>>,
    refusal: Cell<Option<Refusal>>,
    is_done: Cell<bool>,
    bell: Bell,
}

impl Completion {
    /// Whether the verb has completed.
    pub fn is_done(&self) -> bool {
        self.0.is_done.get()
    }

    /// Reason why the verb was refused; `None` if it was not.
    pub fn refusal(&self) -> Option<Refusal> {
        self.0.refusal.get()
    }

    /// Takes the verb's result, which is that of [`Completion::done`]; empty before the verb has completed.
    pub fn take(&self) -> Vec<u8> {
        if self.is_done() { self.0.answer.take() } else { Vec::new() }
    }

    /// Waits until the verb has completed.
    pub async fn complete(&self) {
        while !self.is_done() {
            self.0.bell.rung().await;
        }
    }

    /// Waits for the completion and takes its result: the bytes of a READ, the old word of an atomic, nothing for a
    /// WRITE.
    pub async fn done(&self) -> Vec<u8> {
        self.complete().await;
        self.0.answer.take()
    }
}

impl Connection {
    /// The NIC that executes this connection's verbs.
    pub fn nic(&self) -> &Nic {
        &self.0.nic
    }

    /// Posts a verb without a permit: it may access everything. A fenced verb and all verbs after it wait until the
    /// earlier READs and atomics have completed.
    pub fn post(&self, verb: Verb, is_fenced: bool) -> Completion {
        self.post_list(None, [(verb, is_fenced)]).pop().expect("one verb has one completion")
    }

    /// Posts verbs together, in order. Each has whether it is fenced; see [`Connection::post`].
    pub fn post_list(
        &self,
        permit: Option<Permit>,
        verbs: impl IntoIterator<Item = (Verb, bool)>,
    ) -> Vec<Completion> {
        let list = Rc::new(List { permit, is_refused: Cell::new(false) });
        let posted = verbs.into_iter().map(|(verb, is_fenced)| {
            let completion = Completion::default();
            let list = Rc::clone(&list);
            self.0.held.borrow_mut().push_back(Posted {
                verb,
                is_fenced,
                list,
                completion: completion.clone(),
            });
            completion
        });
        let completions = posted.collect();
        self.send();
        completions
    }

    /// Closes the connection at the node's side: no later effect takes place, and no verb completes. An atomic that
    /// has fetched its word writes it back now, since the NIC executes it without the client.
    pub fn close(&self) {
        if self.0.is_closed.replace(true) || self.0.nic.0.is_stopped.get() {
            return;
        }
        for (at, new) in self.0.unwritten.take() {
            if let Some(new) = new.take() {
                self.0.nic.poke(at, &new.to_le_bytes());
            }
        }
    }

    fn is_dead(&self) -> bool {
        self.0.is_closed.get() || self.0.nic.0.is_stopped.get()
    }

    /// Calls `effect` at a time, unless the connection is dead by then.
    fn at(&self, when: Nanos, effect: impl FnOnce(&Nic) + 'static) {
        let connection = self.clone();
        self.0.nic.0.world.at(when, move || {
            if !connection.is_dead() {
                effect(&connection.0.nic);
            }
        });
    }

    /// Sends posted verbs in order, up to the first verb that waits for a fence.
    fn send(&self) {
        loop {
            let mut held = self.0.held.borrow_mut();
            self.0.outstanding.borrow_mut().retain(|completion| !completion.is_done());
            let Some(Posted { is_fenced, .. }) = held.front() else { return };
            if *is_fenced && !self.0.outstanding.borrow().is_empty() {
                return;
            }
            let posted = held.pop_front().expect("the queue is not empty");
            drop(held);
            if !posted.verb.is_write() {
                self.0.outstanding.borrow_mut().push(posted.completion.clone());
            }
            let Inner { world, timing, .. } = &*self.0.nic.0;
            let leaves = match &self.0.sender {
                Some((sender, number)) => sender.leaves(world.now(), *number),
                None => world.now(),
            };
            if self.0.path.is_some() {
                self.send_over(leaves, posted);
                continue;
            }
            let flight = timing.flight_ns + self.0.nic.spread(timing.flight_spread_ns);
            let at = (leaves + flight).max(self.0.arrives.get());
            self.0.arrives.set(at);
            let connection = self.clone();
            world.at(at, move || connection.arrived(posted));
        }
    }

    /// Sends a verb over the network when it leaves the client's NIC. If the network's connection is broken by then,
    /// the verb is lost.
    fn send_over(&self, leaves: Nanos, posted: Posted) {
        let connection = self.clone();
        let send = move || {
            let Some(Path { network, client, node }) = &connection.0.path else { return };
            let (packet, arrives) = ((posted.verb.name(), posted.verb.payload()[0]), connection.clone());
            let _broken_is_told = network.carry_on(*client, *node, packet, move || arrives.arrived(posted));
        };
        if leaves <= self.0.nic.0.world.now() { send() } else { self.0.nic.0.world.at(leaves, send) }
    }

    /// Handles a verb that has reached the NIC: fixes the times of all its effects.
    fn arrived(&self, posted: Posted) {
        let Inner { world, .. } = &*self.0.nic.0;
        if self.is_dead() {
            return;
        }
        let Posted { verb, list, completion, .. } = posted;
        let served = self.0.nic.served(world.now());
        let after_writes = served.max(self.0.landed.get());
        let (at, len, rights) = verb.access();
        if list.is_refused.get() || !list.permits(at, len, rights) {
            let is_later = list.is_refused.replace(true);
            completion.0.refusal.set(Some(if is_later { Refusal::Aborted } else { Refusal::Access }));
            return self.completes(after_writes, completion);
        }
        let done = match verb {
            Verb::Read { at, len } => self.read(at, len, after_writes, &list, &completion),
            Verb::Write { at, bytes } => self.write(at, &bytes, after_writes, &list, &completion),
            Verb::Cas { at, compare, swap, masks: [compared, swapped] } => {
                let change = move |old: u64| {
                    (old & compared == compare & compared).then_some(old & !swapped | swap & swapped)
                };
                self.atomic(at, after_writes, &list, &completion, change)
            }
            Verb::FetchAdd { at, add } => {
                let change = move |old: u64| Some(old.wrapping_add(add));
                self.atomic(at, after_writes, &list, &completion, change)
            }
        };
        self.completes(done, completion);
    }

    /// Sends the completion of a verb that is done at a time. Completions arrive in the order in which verbs were
    /// posted.
    fn completes(&self, done: Nanos, completion: Completion) {
        let Inner { world, timing, .. } = &*self.0.nic.0;
        let connection = self.clone();
        let completion_bytes = completion.0.answer.borrow().len();
        let complete = move || {
            completion.0.is_done.set(true);
            completion.0.bell.ring();
            connection.send();
        };
        if self.0.path.is_none() {
            let back = done + timing.flight_ns + self.0.nic.spread(timing.flight_spread_ns);
            let back = back.max(self.0.completes.get());
            self.0.completes.set(back);
            return world.at(back, complete);
        }
        let done = done.max(self.0.completes.get());
        self.0.completes.set(done);
        let answers = self.clone();
        self.at(done, move |_| {
            let Some(Path { network, client, node }) = &answers.0.path else { return };
            let packet = ("completion", completion_bytes);
            let _broken_is_told = network.carry_on(*node, *client, packet, complete);
        });
    }

    /// Fixes the times at which the lines of a READ are copied. Returns the time when the READ ends.
    fn read(&self, at: u64, len: usize, from: Nanos, list: &Rc<List>, completion: &Completion) -> Nanos {
        let Inner { timing, .. } = &*self.0.nic.0;
        completion.0.answer.borrow_mut().resize(len, 0);
        let fetch = if at & ON_CHIP == 0 { timing.fetch_ns } else { timing.on_chip_ns };
        let from = from.max(self.0.written_back.get());
        let whole: Rc<RefCell<Vec<u8>>> = Rc::default();
        let mut done = from;
        for (start, end) in lines(at, len) {
            let when = from + fetch + self.0.nic.spread(timing.fetch_spread_ns);
            done = done.max(when);
            let (list, completion, whole) = (Rc::clone(list), completion.clone(), Rc::clone(&whole));
            self.at(when, move |nic| {
                if !list.permits(at + start as u64, (end - start) as u64, Rights::READ) {
                    return completion.0.refusal.set(Some(Refusal::Access));
                }
                let mut answer = completion.0.answer.borrow_mut();
                nic.peek(at + start as u64, &mut answer[start..end]);
                if nic.0.seen.borrow().is_none() || len as u64 <= LINE || at & ON_CHIP != 0 {
                    return;
                }
                // The whole READ at the instant of its first line: a difference shows that the READ is torn.
                let mut whole = whole.borrow_mut();
                if whole.is_empty() {
                    whole.resize(len, 0);
                    nic.0.bytes.peek(at, &mut whole);
                } else if answer[start..end] != whole[start..end] {
                    nic.count(|seen| seen.torn_reads += 1);
                }
            });
        }
        done
    }

    /// Fixes the times at which the lines of a WRITE land. Returns the time when the last line has landed.
    fn write(&self, at: u64, written: &[u8], from: Nanos, list: &Rc<List>, completion: &Completion) -> Nanos {
        let Inner { world, timing, .. } = &*self.0.nic.0;
        let mut pieces: Vec<_> = lines(at, written.len()).collect();
        if timing.relaxed {
            world.random().shuffle(&mut pieces);
        }
        let mut when = from;
        for (start, end) in pieces {
            when += self.0.nic.spread(timing.land_spread_ns);
            let (at, piece) = (at + start as u64, written[start..end].to_vec());
            let (list, completion) = (Rc::clone(list), completion.clone());
            self.at(when, move |nic| {
                if list.permits(at, piece.len() as u64, Rights::WRITE) {
                    nic.poke(at, &piece);
                } else {
                    completion.0.refusal.set(Some(Refusal::Access));
                }
            });
        }
        self.0.landed.set(self.0.landed.get().max(when));
        when
    }

    /// Fixes the times at which an atomic acquires its slot, fetches and writes back. Returns the time when the atomic
    /// ends.
    fn atomic(
        &self,
        at: u64,
        from: Nanos,
        list: &Rc<List>,
        completion: &Completion,
        change: impl FnOnce(u64) -> Option<u64> + 'static,
    ) -> Nanos {
        let Inner { world, timing, slots, .. } = &*self.0.nic.0;
        let mut slots = slots.borrow_mut();
        let is_on_chip = at & ON_CHIP != 0;
        let slot = if is_on_chip { at } else { (at & timing.slot_mask) / 8 };
        let held = slots.entry(slot).or_default();
        held.retain(|&(_, to)| to >= world.now());
        let until_slot = if is_on_chip { 0 } else { timing.atomic_ns };
        let mut fetch = from + until_slot + self.0.nic.spread(timing.fetch_spread_ns);
        let holds = if is_on_chip { timing.on_chip_ns } else { timing.slot_ns };
        let length = holds + self.0.nic.spread(timing.slot_spread_ns);
        // An atomic that arrives later may hold the slot earlier, if its interval fits in a gap.
        while let Some(&(_, to)) = held.iter().find(|&&(from, to)| fetch < to && from <= fetch + length) {
            fetch = to;
        }
        let back = fetch + length;
        held.push((fetch, back));
        self.0.written_back.set(self.0.written_back.get().max(back));
        let new: Unwritten = Rc::default();
        let (list, answered, found) = (Rc::clone(list), completion.clone(), Rc::clone(&new));
        let connection = self.clone();
        self.at(fetch, move |nic| {
            if !list.permits(at, 8, Rights::ATOMIC) {
                return answered.0.refusal.set(Some(Refusal::Access));
            }
            let mut old = [0; 8];
            nic.peek(at, &mut old);
            *answered.0.answer.borrow_mut() = old.to_vec();
            found.set(change(u64::from_le_bytes(old)));
            connection.0.unwritten.borrow_mut().push((at, found));
        });
        let connection = self.clone();
        self.at(back, move |nic| {
            if let Some(new) = new.take() {
                nic.poke(at, &new.to_le_bytes());
            }
            connection.0.unwritten.borrow_mut().retain(|(_, unwritten)| !Rc::ptr_eq(unwritten, &new));
        });
        back
    }
}

/// Splits an access into ranges, one per cache line.
fn lines(at: u64, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let to = (from + (LINE - (at + from as u64) % LINE) as usize).min(len);
        let line = (from < len).then_some((from, to));
        from = to;
        line
    })
}
