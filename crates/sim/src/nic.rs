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
//! Invariant: the times of all effects of a verb are fixed when it arrives, so later arrivals cannot change them.

use crate::memory::{Bytes, LINE};
use crate::station::Sender;
use crate::world::{Bell, Nanos, World};
use farside_remote::Width;
use foldhash::fast::FixedState;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// Verb that the NIC executes. Its addresses are byte offsets in the node's memory.
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
    /// Replaces the aligned word at `at` by `swap` if it equals `compare`.
    Cas {
        /// Address of the word.
        at: u64,
        /// Value that the word must have.
        compare: u64,
        /// Value to store in the word.
        swap: u64,
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
    /// Bits of an atomic's address that select its slot, in units of words.
    pub slot_mask: u64,
    /// Whether the lines of a WRITE may land in any order.
    pub relaxed: bool,
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
        }))
    }

    /// Opens a connection (a queue pair) to the NIC.
    pub fn connect(&self) -> Connection {
        self.connected(None)
    }

    /// Opens a connection to the NIC from a machine whose connections share the NIC `sender`. `number` identifies this
    /// connection at `sender`.
    pub fn connect_from(&self, sender: &Rc<Sender>, number: u32) -> Connection {
        self.connected(Some((Rc::clone(sender), number)))
    }

    fn connected(&self, sender: Option<(Rc<Sender>, u32)>) -> Connection {
        Connection(Rc::new(Pair {
            nic: self.clone(),
            sender,
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

struct Pair {
    nic: Nic,
    /// The NIC that sends posted verbs, and the number of this connection at that NIC.
    sender: Option<(Rc<Sender>, u32)>,
    /// Posted verbs that wait for a fence, in order. Each has its verb, whether it is fenced, and its completion.
    held: RefCell<VecDeque<(Verb, bool, Completion)>>,
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
    is_done: Cell<bool>,
    bell: Bell,
}

impl Completion {
    /// Whether the verb has completed.
    pub fn is_done(&self) -> bool {
        self.0.is_done.get()
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
    /// Posts a verb. A fenced verb and all verbs after it wait until the earlier READs and atomics have completed.
    pub fn post(&self, verb: Verb, is_fenced: bool) -> Completion {
        let completion = Completion::default();
        self.0.held.borrow_mut().push_back((verb, is_fenced, completion.clone()));
        self.send();
        completion
    }

    /// Sends posted verbs in order, up to the first verb that waits for a fence.
    fn send(&self) {
        loop {
            let mut held = self.0.held.borrow_mut();
            self.0.outstanding.borrow_mut().retain(|completion| !completion.is_done());
            let Some((_, is_fenced, _)) = held.front() else { return };
            if *is_fenced && !self.0.outstanding.borrow().is_empty() {
                return;
            }
            let (verb, _, completion) = held.pop_front().expect("the queue is not empty");
            drop(held);
            if !verb.is_write() {
                self.0.outstanding.borrow_mut().push(completion.clone());
            }
            let Inner { world, timing, .. } = &*self.0.nic.0;
            let flight = timing.flight_ns + self.0.nic.spread(timing.flight_spread_ns);
            let leaves = match &self.0.sender {
                Some((sender, number)) => sender.leaves(world.now(), *number),
                None => world.now(),
            };
            let at = (leaves + flight).max(self.0.arrives.get());
            self.0.arrives.set(at);
            let connection = self.clone();
            world.at(at, move || connection.arrived(verb, completion));
        }
    }

    /// Handles a verb that has reached the NIC: fixes the times of all its effects.
    fn arrived(&self, verb: Verb, completion: Completion) {
        let Inner { world, bytes, timing, .. } = &*self.0.nic.0;
        let served = self.0.nic.served(world.now());
        let after_writes = served.max(self.0.landed.get());
        let done = match &verb {
            Verb::Read { at, len } => {
                completion.0.answer.borrow_mut().resize(*len, 0);
                let mut done = after_writes;
                for (start, end) in lines(*at, *len) {
                    let from = after_writes.max(self.0.written_back.get());
                    let when = from + timing.fetch_ns + self.0.nic.spread(timing.fetch_spread_ns);
                    done = done.max(when);
                    let (bytes, completion, at) = (Rc::clone(bytes), completion.clone(), *at);
                    world.at(when, move || {
                        let out = &mut completion.0.answer.borrow_mut()[start..end];
                        bytes.peek(at + start as u64, out);
                    });
                }
                done
            }
            Verb::Write { at, bytes: written } => {
                let mut pieces: Vec<_> = lines(*at, written.len()).collect();
                if timing.relaxed {
                    world.random().shuffle(&mut pieces);
                }
                let mut when = after_writes;
                for (start, end) in pieces {
                    when += self.0.nic.spread(timing.land_spread_ns);
                    let (bytes, at, piece) =
                        (Rc::clone(bytes), at + start as u64, written[start..end].to_vec());
                    world.at(when, move || bytes.poke(at, &piece));
                }
                self.0.landed.set(self.0.landed.get().max(when));
                when
            }
            Verb::Cas { at, compare, swap } => {
                let (compare, swap) = (*compare, *swap);
                self.atomic(*at, after_writes, &completion, move |old| (old == compare).then_some(swap))
            }
            Verb::FetchAdd { at, add } => {
                let add = *add;
                self.atomic(*at, after_writes, &completion, move |old| Some(old.wrapping_add(add)))
            }
        };
        // Completions arrive in the order in which verbs were posted.
        let back = done + timing.flight_ns + self.0.nic.spread(timing.flight_spread_ns);
        let back = back.max(self.0.completes.get());
        self.0.completes.set(back);
        let connection = self.clone();
        world.at(back, move || {
            completion.0.is_done.set(true);
            completion.0.bell.ring();
            connection.send();
        });
    }

    /// Fixes the times at which an atomic acquires its slot, fetches and writes back. Returns the time when the atomic
    /// ends.
    fn atomic(
        &self,
        at: u64,
        from: Nanos,
        completion: &Completion,
        change: impl FnOnce(u64) -> Option<u64> + 'static,
    ) -> Nanos {
        let Inner { world, bytes, timing, slots, .. } = &*self.0.nic.0;
        let mut slots = slots.borrow_mut();
        let held = slots.entry((at & timing.slot_mask) / 8).or_default();
        held.retain(|&(_, to)| to >= world.now());
        let mut fetch = from + timing.atomic_ns + self.0.nic.spread(timing.fetch_spread_ns);
        let length = timing.slot_ns + self.0.nic.spread(timing.slot_spread_ns);
        // An atomic that arrives later may hold the slot earlier, if its interval fits in a gap.
        while let Some(&(_, to)) = held.iter().find(|&&(from, to)| fetch < to && from <= fetch + length) {
            fetch = to;
        }
        let back = fetch + length;
        held.push((fetch, back));
        self.0.written_back.set(self.0.written_back.get().max(back));
        let new = Rc::new(Cell::new(None));
        let (memory, answered, found) = (Rc::clone(bytes), completion.clone(), Rc::clone(&new));
        world.at(fetch, move || {
            let old = memory.load(at, Width::W8) as u64;
            *answered.0.answer.borrow_mut() = old.to_le_bytes().to_vec();
            found.set(change(old));
        });
        let memory = Rc::clone(bytes);
        world.at(back, move || {
            if let Some(new) = new.get() {
                memory.poke(at, &new.to_le_bytes());
            }
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
