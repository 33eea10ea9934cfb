//! Queue pairs: connections on which clients post lists of verbs, and the effects of these verbs.
//!
//! Invariant: the times of all effects of a verb are fixed when it arrives, so later arrivals cannot change them. Once
//! a connection is closed or the NIC is stopped, no later effect takes place.

use super::{Effect, Inner, Nic, ON_CHIP, Sender, Step, Verb};
use crate::hardware::answer_len;
use crate::memory::LINE;
use crate::network::{Address, Network};
use crate::world::{Bell, Nanos};
use farside_remote::Rights;
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

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
    /// Opens a connection (a queue pair) to the NIC.
    pub fn connect(&self) -> Connection {
        self.connected(None, None)
    }

    /// Opens a connection whose packets pass over the network's connection from `client` to `node`, with its delays
    /// and faults. The latency of [`super::Timing::flight_ns`] does not apply.
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
        let number = self.0.connections.get();
        self.0.connections.set(number + 1);
        Connection(Rc::new(Pair {
            nic: self.clone(),
            number,
            arrived: Cell::new(0),
            sender,
            path,
            is_closed: Cell::new(false),
            unwritten: RefCell::default(),
            held: RefCell::default(),
            outstanding: RefCell::default(),
            arrives: Cell::new(0),
            returns: Cell::new(0),
            completes: Cell::new(0),
            landed: Cell::new(0),
            written_back: Cell::new(0),
        }))
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

/// Message that is no verb: a request to the node's software, or a chain for the NIC's firmware.
#[derive(Clone, Copy, Debug)]
pub struct Message {
    /// Size in bytes on the wire.
    pub bytes: u64,
    /// Number of ops that both NICs take for it.
    pub ops: u64,
    /// Latency, in nanoseconds, of its round trip in addition to a verb's.
    pub extra_ns: Nanos,
}

/// A message on its way to the node, or its response on the way back.
pub struct Exchange {
    connection: Connection,
    message: Message,
    stage: Stage,
}

/// Progress of an exchange, with the virtual time at which the next stage begins.
#[derive(Clone, Copy)]
enum Stage {
    /// The message has been sent.
    Sent { arrives: Nanos },
    /// The NIC has received the message.
    Received { served: Nanos },
    /// The node has carried out the request. The response has this size in bytes on the wire.
    Served { ready: Nanos, bytes: u64 },
    /// The response has left the node.
    Answered { returns: Nanos },
}

impl Exchange {
    /// Waits for the response. Calls `serve` when the node's software or the NIC's firmware receives the message.
    /// `serve` returns the virtual time when the response is ready, and the response's size in bytes on the wire.
    ///
    /// If this future is dropped, the exchange stops where it is. Call this function again to let it go on.
    pub async fn complete(&mut self, serve: impl FnOnce() -> (Nanos, u64)) {
        let Message { bytes, ops, extra_ns } = self.message;
        let connection = self.connection.clone();
        let (nic, world) = (&connection.0.nic, &connection.0.nic.0.world);
        let mut serve = Some(serve);
        loop {
            self.stage = match self.stage {
                Stage::Sent { arrives } => {
                    world.sleep_until(arrives).await;
                    Stage::Received { served: nic.receive(bytes, ops) + extra_ns / 2 }
                }
                Stage::Received { served } => {
                    world.sleep_until(served).await;
                    let serve = serve.take().expect("a message is received once");
                    let (ready, bytes) = serve();
                    Stage::Served { ready, bytes }
                }
                Stage::Served { ready, bytes } => {
                    world.sleep_until(ready).await;
                    let returns = connection.returns(nic.respond(bytes, true)) + extra_ns.div_ceil(2);
                    Stage::Answered { returns }
                }
                Stage::Answered { returns } => return world.sleep_until(returns).await,
            };
        }
    }

    /// Whether the response has left the node, so that no part of the node waits for the exchange.
    pub fn is_answered(&self) -> bool {
        matches!(self.stage, Stage::Answered { .. })
    }
}

/// Word that an atomic is to write back, if it changes the word.
type Unwritten = Rc<Cell<Option<u64>>>;

/// A verb of a list that was posted.
struct Posted {
    verb: Verb,
    is_fenced: bool,
    is_last: bool,
    list: Rc<List>,
    completion: Completion,
}

struct Pair {
    nic: Nic,
    number: u64,
    /// Number of verbs that have arrived at the node.
    arrived: Cell<u64>,
    /// The NIC that sends posted verbs, and the number of this connection at that NIC.
    sender: Option<(Rc<Sender>, u32)>,
    path: Option<Path>,
    is_closed: Cell<bool>,
    /// Address and new value of each atomic that has fetched its word and not written it back, with the atomic's list.
    unwritten: RefCell<Vec<(u64, Unwritten, Rc<List>)>>,
    /// Posted verbs that wait for a fence, in order.
    held: RefCell<VecDeque<Posted>>,
    /// Completions of the READs and atomics that are in flight.
    outstanding: RefCell<Vec<Completion>>,
    /// Virtual times at which the last message reaches the node (`arrives`), and the last response the client
    /// (`returns`).
    arrives: Cell<Nanos>,
    returns: Cell<Nanos>,
    /// Virtual time at which the last arrived verb has completed at the node.
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
    /// Number of the verb on its connection, from its arrival on.
    verb: Cell<u64>,
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
    /// Number of the connection: the number of connections of its NIC that were opened before it.
    pub fn number(&self) -> u64 {
        self.0.number
    }

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
        let mut verbs = verbs.into_iter().peekable();
        let mut completions = Vec::new();
        while let Some((verb, is_fenced)) = verbs.next() {
            let (is_last, completion) = (verbs.peek().is_none(), Completion::default());
            completions.push(completion.clone());
            let list = Rc::clone(&list);
            self.0.held.borrow_mut().push_back(Posted { verb, is_fenced, is_last, list, completion });
        }
        self.send();
        completions
    }

    /// Closes the connection at the node's side: no later effect takes place, and no verb completes. An atomic that
    /// has fetched its word writes it back now, since the NIC executes it without the client; unless its permit has
    /// ended, as the memory may belong to others by now.
    pub fn close(&self) {
        if self.0.is_closed.replace(true) || self.0.nic.is_stopped() {
            return;
        }
        for (at, new, list) in self.0.unwritten.take() {
            if let Some(new) = new.take().filter(|_| list.permits(at, 8, Rights::ATOMIC)) {
                self.0.nic.poke(at, &new.to_le_bytes());
            }
        }
    }

    /// Tells the NIC's watcher that a step of this connection's verb has accessed `len` bytes.
    fn tell(&self, completion: &Completion, step: Step, len: usize) {
        let verb = completion.0.verb.get();
        self.0.nic.tell(Effect { connection: self.0.number, verb, step, len });
    }

    fn is_dead(&self) -> bool {
        self.0.is_closed.get() || self.0.nic.is_stopped()
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
            let leaves = self.leaves(1);
            if self.0.path.is_some() {
                self.send_over(leaves, posted);
                continue;
            }
            let connection = self.clone();
            self.0.nic.0.world.at(self.arrives(leaves), move || connection.arrived(posted));
        }
    }

    /// Returns the virtual time at which a message with this many ops leaves the client's NIC.
    fn leaves(&self, ops: u64) -> Nanos {
        let now = self.0.nic.0.world.now();
        match &self.0.sender {
            Some((sender, number)) => sender.leaves(now, *number, ops),
            None => now,
        }
    }

    /// Returns the virtual time at which a message that leaves the client's NIC at `leaves` reaches the node.
    fn arrives(&self, leaves: Nanos) -> Nanos {
        let at = (leaves + self.0.nic.flight()).max(self.0.arrives.get());
        self.0.arrives.set(at);
        at
    }

    /// Returns the virtual time at which a response that has left the node at `sent` reaches the client.
    fn returns(&self, sent: Nanos) -> Nanos {
        let at = (sent + self.0.nic.flight()).max(self.0.returns.get());
        self.0.returns.set(at);
        at
    }

    /// Sends a message that is no verb, and waits for the response: see [`Exchange::complete`].
    ///
    /// # Panics
    /// If the connection passes over a [`Network`].
    pub async fn exchange(&self, message: Message, serve: impl FnOnce() -> (Nanos, u64)) {
        self.send_message(message).complete(serve).await;
    }

    /// Sends a message that is no verb.
    ///
    /// # Panics
    /// If the connection passes over a [`Network`].
    pub fn send_message(&self, message: Message) -> Exchange {
        assert!(self.0.path.is_none(), "messages over a network are the network's own");
        let stage = Stage::Sent { arrives: self.arrives(self.leaves(message.ops)) };
        Exchange { connection: self.clone(), message, stage }
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
        if self.is_dead() {
            return;
        }
        let Posted { verb, is_last, list, completion, .. } = posted;
        completion.0.verb.set(self.0.arrived.replace(self.0.arrived.get() + 1));
        let timing = self.0.nic.timing();
        let [bytes, answered] = verb.wire_bytes(timing.packet_max);
        let ops = if timing.lists_are_ops && !is_last { 0 } else { 1 };
        let after_writes = self.0.nic.receive(bytes, ops).max(self.0.landed.get());
        let (at, len, rights) = verb.access();
        if list.is_refused.get() || !list.permits(at, len, rights) {
            let is_later = list.is_refused.replace(true);
            completion.0.refusal.set(Some(if is_later { Refusal::Aborted } else { Refusal::Access }));
            return self.completes(after_writes, answer_len(0), is_last, completion);
        }
        // The response to the next verb acknowledges a WRITE, too.
        let answered = if verb.is_write() && !is_last { 0 } else { answered };
        let done = match verb {
            Verb::Read { at, len } => self.read(at, len, after_writes, &list, &completion),
            Verb::Write { at, bytes } => self.write(at, bytes, after_writes, &list, &completion),
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
        self.completes(done, answered, is_last, completion);
    }

    /// Sends the completion of a verb that is done at a time, with a response of `bytes` bytes on the wire. Completions
    /// arrive in the order in which verbs were posted.
    fn completes(&self, done: Nanos, bytes: u64, is_last: bool, completion: Completion) {
        let done = done.max(self.0.completes.get());
        self.0.completes.set(done);
        let connection = self.clone();
        self.at(done, move |nic| {
            let sent = nic.respond(bytes, is_last);
            let completion_bytes = completion.0.answer.borrow().len();
            let completed = connection.clone();
            let complete = move || {
                completion.0.is_done.set(true);
                completion.0.bell.ring();
                completed.send();
            };
            let world = &nic.0.world;
            let Some(Path { network, client, node }) = &connection.0.path else {
                return world.at(connection.returns(sent), complete);
            };
            let (network, [from, to]) = (network.clone(), [*node, *client]);
            let send = move || {
                let _broken_is_told = network.carry_on(from, to, ("completion", completion_bytes), complete);
            };
            if sent <= world.now() { send() } else { world.at(sent, send) }
        });
    }

    /// Fixes the times at which the lines of a READ are copied. Returns the time when the READ ends.
    fn read(&self, at: u64, len: usize, from: Nanos, list: &Rc<List>, completion: &Completion) -> Nanos {
        let nic = &self.0.nic;
        completion.0.answer.borrow_mut().resize(len, 0);
        let from = from.max(self.0.written_back.get());
        let fetched = lines(at, len).map(|line| {
            let timing = &nic.0.timing;
            let access_ns = if at & ON_CHIP == 0 { timing.fetch_ns } else { timing.on_chip_ns };
            let when = from
                + access_ns
                + nic.late(self.0.number, Step::Fetch(at + line.0 as u64), timing.fetch_spread_ns);
            (when, line)
        });
        let snapshot: Rc<Cell<Option<Snapshot>>> = Rc::default();
        let mut done = from;
        for (when, (start, end)) in together(fetched) {
            done = done.max(when);
            let (list, completion, snapshot) = (Rc::clone(list), completion.clone(), Rc::clone(&snapshot));
            let connection = self.clone();
            self.at(when, move |nic| {
                if !list.permits(at + start as u64, (end - start) as u64, Rights::READ) {
                    return completion.0.refusal.set(Some(Refusal::Access));
                }
                let mut answer = completion.0.answer.borrow_mut();
                nic.peek(at + start as u64, &mut answer[start..end]);
                connection.tell(&completion, Step::Fetch(at + start as u64), end - start);
                if nic.0.seen.borrow().is_none() || end - start == len || at & ON_CHIP != 0 {
                    return;
                }
                let mut whole = snapshot.take().unwrap_or_else(|| {
                    let mut bytes = vec![0; len];
                    nic.bytes().peek(at, &mut bytes);
                    Snapshot { bytes, is_torn: false }
                });
                if !whole.is_torn && answer[start..end] != whole.bytes[start..end] {
                    whole.is_torn = true;
                    nic.count(|seen| seen.torn_reads += 1);
                }
                snapshot.set(Some(whole));
            });
        }
        done
    }

    /// Fixes the times at which the lines of a WRITE land. Returns the time when the last line has landed.
    fn write(
        &self,
        at: u64,
        written: Vec<u8>,
        from: Nanos,
        list: &Rc<List>,
        completion: &Completion,
    ) -> Nanos {
        let Inner { world, timing, .. } = &*self.0.nic.0;
        let mut pieces: Vec<_> = lines(at, written.len()).collect();
        if timing.relaxed {
            world.random().shuffle(&mut pieces);
        }
        let mut when = from;
        let landed = pieces.into_iter().map(|piece| {
            when += self.0.nic.late(self.0.number, Step::Land(at + piece.0 as u64), timing.land_spread_ns);
            (when, piece)
        });
        let is_cut = Rc::new(Cell::new(false));
        let mut left = written.len();
        for (when, (start, end)) in together(landed) {
            left -= end - start;
            let (at, piece, is_last) = (at + start as u64, written[start..end].to_vec(), left == 0);
            let (list, completion, is_cut) = (Rc::clone(list), completion.clone(), Rc::clone(&is_cut));
            let connection = self.clone();
            world.at(when, move || {
                let nic = &connection.0.nic;
                if !connection.is_dead() {
                    if list.permits(at, piece.len() as u64, Rights::WRITE) {
                        nic.poke(at, &piece);
                        connection.tell(&completion, Step::Land(at), piece.len());
                        return is_cut.set(!is_last);
                    }
                    completion.0.refusal.set(Some(Refusal::Access));
                }
                if is_cut.take() {
                    nic.count(|seen| seen.cut_writes += 1);
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
        let [fetch, back] = self.0.nic.locked_by(self.0.number, at, from);
        self.0.written_back.set(self.0.written_back.get().max(back));
        let new: Unwritten = Rc::default();
        let (list, answered, found) = (Rc::clone(list), completion.clone(), Rc::clone(&new));
        let (permitted, refused) = (Rc::clone(&list), completion.clone());
        let connection = self.clone();
        self.at(fetch, move |nic| {
            if !list.permits(at, 8, Rights::ATOMIC) {
                return answered.0.refusal.set(Some(Refusal::Access));
            }
            let mut old = [0; 8];
            nic.peek(at, &mut old);
            *answered.0.answer.borrow_mut() = old.to_vec();
            connection.tell(&answered, Step::Lock(at), 8);
            found.set(change(u64::from_le_bytes(old)));
            connection.0.unwritten.borrow_mut().push((at, found, list));
        });
        let connection = self.clone();
        self.at(back, move |nic| {
            if let Some(value) = new.take() {
                match permitted.permits(at, 8, Rights::ATOMIC) {
                    true => {
                        nic.poke(at, &value.to_le_bytes());
                        connection.tell(&refused, Step::WriteBack(at), 8);
                    }
                    false => refused.0.refusal.set(Some(Refusal::Access)),
                }
            }
            connection.0.unwritten.borrow_mut().retain(|(_, unwritten, _)| !Rc::ptr_eq(unwritten, &new));
        });
        back
    }
}

/// All bytes of a READ at the instant at which its first line is copied. The READ is torn if another line differs.
struct Snapshot {
    bytes: Vec<u8>,
    is_torn: bool,
}

/// A range of an access's bytes, and the time when they are accessed.
type Timed = (Nanos, (usize, usize));

/// Joins successive ranges that are adjacent and accessed at the same time, so that they take one event.
fn together(ranges: impl Iterator<Item = Timed>) -> impl Iterator<Item = Timed> {
    let mut ranges = ranges.peekable();
    std::iter::from_fn(move || {
        let (when, (start, mut end)) = ranges.next()?;
        while let Some((_, (_, next))) = ranges.next_if(|&(at, (from, _))| at == when && from == end) {
            end = next;
        }
        Some((when, (start, end)))
    })
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
