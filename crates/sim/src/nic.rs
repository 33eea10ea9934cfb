//! A NIC that serves classic verbs on a node's memory without its CPU: READ, WRITE, CAS and FETCH-AND-ADD over reliable
//! connections, as the memory contract of one-sided RDMA has it and not better.
//!
//! * A READ is one snapshot of each cache line, at any time in its window, in any order.
//! * A WRITE lands line by line, in the order of addresses unless memory is relaxed.
//! * An atomic fetches at one time and writes back later, holding one of the NIC's lock slots: it is atomic to other
//!   atomics of that slot and to nothing else. A CAS that finds something else writes nothing.
//! * On one connection a WRITE is before all that follows it, and an atomic before the READs that do. Nothing else is,
//!   but by a fence or by waiting for a completion.
//!
//! Invariant: the times of all that a verb does are settled when it arrives, so nothing that comes later can change
//! them.

use crate::memory::{Bytes, LINE};
use crate::station::Sender;
use crate::world::{Bell, Nanos, World};
use farside_remote::Width;
use foldhash::fast::FixedState;
use std::cell::{Cell, RefCell};
use std::collections::{HashMap, VecDeque};
use std::rc::Rc;

/// One verb. Addresses are bytes of the node's memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verb {
    /// So many bytes from there.
    Read {
        /// The first.
        at: u64,
        /// How many.
        len: usize,
    },
    /// These bytes to there.
    Write {
        /// Where the first goes.
        at: u64,
        /// What is written.
        bytes: Vec<u8>,
    },
    /// The word at `at`, which is aligned, becomes `swap` if it is `compare`.
    Cas {
        /// The word.
        at: u64,
        /// What it must be.
        compare: u64,
        /// What it becomes.
        swap: u64,
    },
    /// The word at `at`, which is aligned, grows by so much, wrapping.
    FetchAdd {
        /// The word.
        at: u64,
        /// By how much.
        add: u64,
    },
}

impl Verb {
    /// Bytes of its request and of its answer, beside their headers.
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

/// How long what a NIC does takes. Where a time has a spread, that is added at random.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Timing {
    /// From posting a verb until it arrives, and from its end until its completion is there.
    pub flight_ns: Nanos,
    /// How much longer a flight usually takes. What is posted later arrives later.
    pub flight_spread_ns: Nanos,
    /// How long the NIC is busy with each verb before the next one can begin.
    pub service_ns: Nanos,
    /// How long a line takes to be fetched from memory.
    pub fetch_ns: Nanos,
    /// How much longer it usually takes, each line by itself.
    pub fetch_spread_ns: Nanos,
    /// How much later each further line of a WRITE usually lands.
    pub land_spread_ns: Nanos,
    /// How long an atomic takes before it asks for its slot.
    pub atomic_ns: Nanos,
    /// How long an atomic holds its slot.
    pub slot_ns: Nanos,
    /// How much longer it usually does.
    pub slot_spread_ns: Nanos,
    /// Which bits of an atomic's address say which slot it holds, in words.
    pub slot_mask: u64,
    /// Lines of a WRITE may land in any order.
    pub relaxed: bool,
}

/// From when, and until when.
type Held = (Nanos, Nanos);

/// The NIC of a node.
#[derive(Clone)]
pub struct Nic(Rc<Inner>);

struct Inner {
    world: World,
    bytes: Rc<Bytes>,
    timing: Timing,
    /// Until when it is busy.
    busy: Cell<Nanos>,
    /// When each lock slot is held, as far as that is settled.
    slots: RefCell<HashMap<u64, Vec<Held>, FixedState>>,
}

impl Nic {
    /// A NIC that serves this memory.
    pub fn new(world: &World, bytes: &Rc<Bytes>, timing: Timing) -> Nic {
        Nic(Rc::new(Inner {
            world: world.clone(),
            bytes: Rc::clone(bytes),
            timing,
            busy: Cell::new(0),
            slots: RefCell::default(),
        }))
    }

    /// A connection to it (a queue pair). What is posted on it is sent by a task of the process that posts first.
    pub fn connect(&self) -> Connection {
        self.connected(None)
    }

    /// As [`Nic::connect`], from a machine whose NIC others use, too: this is its connection of that number.
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

    /// From when on the NIC works on what arrives now.
    fn served(&self, now: Nanos) -> Nanos {
        let at = self.0.busy.get().max(now);
        self.0.busy.set(at + self.0.timing.service_ns);
        at
    }
}

/// One reliable connection.
#[derive(Clone)]
pub struct Connection(Rc<Pair>);

struct Pair {
    nic: Nic,
    /// The NIC that sends what is posted, and which of its connections this is.
    sender: Option<(Rc<Sender>, u32)>,
    /// Posted, and held back by a fence that is not over, with all behind it.
    held: RefCell<VecDeque<(Verb, bool, Completion)>>,
    /// READs and atomics that are not complete.
    outstanding: RefCell<Vec<Completion>>,
    /// When what was sent last arrives.
    arrives: Cell<Nanos>,
    /// When the last completion is there.
    completes: Cell<Nanos>,
    /// When the last of the WRITEs so far has landed, and the last of the atomics written back.
    landed: Cell<Nanos>,
    written_back: Cell<Nanos>,
}

/// The completion of a verb.
#[derive(Clone, Default)]
pub struct Completion(Rc<Completed>);

#[derive(Default)]
struct Completed {
    answer: RefCell<Vec<u8>>,
    is_done: Cell<bool>,
    bell: Bell,
}

impl Completion {
    /// Whether it is there.
    pub fn is_done(&self) -> bool {
        self.0.is_done.get()
    }

    /// Waits for it.
    pub async fn complete(&self) {
        while !self.is_done() {
            self.0.bell.rung().await;
        }
    }

    /// Waits for it, and takes the answer: the bytes of a READ, the old word of an atomic, nothing of a WRITE.
    pub async fn done(&self) -> Vec<u8> {
        self.complete().await;
        self.0.answer.take()
    }
}

impl Connection {
    /// Posts a verb. With a fence it waits, and all behind it, until the READs and atomics before it are complete.
    pub fn post(&self, verb: Verb, is_fenced: bool) -> Completion {
        let completion = Completion::default();
        self.0.held.borrow_mut().push_back((verb, is_fenced, completion.clone()));
        self.send();
        completion
    }

    /// Sends what is not held back, in order.
    fn send(&self) {
        loop {
            let mut held = self.0.held.borrow_mut();
            self.0.outstanding.borrow_mut().retain(|completion| !completion.is_done());
            let Some((_, is_fenced, _)) = held.front() else { return };
            if *is_fenced && !self.0.outstanding.borrow().is_empty() {
                return;
            }
            let (verb, _, completion) = held.pop_front().expect("it was looked at");
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

    /// The verb has reached the NIC: settles when all that it does happens.
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
        // Completions come in the order in which verbs were posted.
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

    /// Settles an atomic: when it holds its slot, fetches and writes back. Answers when it is over.
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
        // What arrives later may come first, where there is room.
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

/// The stretches of an access that lie in one line each.
fn lines(at: u64, len: usize) -> impl Iterator<Item = (usize, usize)> {
    let mut from = 0;
    std::iter::from_fn(move || {
        let to = (from + (LINE - (at + from as u64) % LINE) as usize).min(len);
        let line = (from < len).then_some((from, to));
        from = to;
        line
    })
}
