//! Objects under one-sided latches, as compared by Ziegler, Nelson-Slivon, Leis and Binnig, *Design Guidelines for
//! Correct, Efficient, and Scalable Synchronization using One-Sided RDMA* (SIGMOD 2023).
//!
//! Each object has a latch, and content that is updated in place. A [`Scheme`] says how clients take and release the
//! latch, and how they read. All requests are classic verbs: READ, WRITE, CAS and FETCH-ADD.
//!
//! - [`scheme`]: the schemes and their names. `layout`: the bytes of the objects.
//! - `exclusive` and `shared` (this file): operations that hold the latch. `optimistic`: reads without the latch.
//! - `lane`: the parts of an operation that go on when its caller has gone, or that nobody awaits. `keeper`: the task
//!   that goes on with them.
//! - `system`: the entry in the registry, and the work of the node's CPU. [`mutants`]: broken schemes.
//! - [`btree`]: a tree whose nodes are the objects.
//!
//! What each scheme relies on (section 1 of the memory contract, `farside_sim::nic`):
//!
//! | steps | awaited round trips, exclusive and shared | relies on |
//! | --- | --- | --- |
//! | basic | 4, 3 | nothing |
//! | speculative | 3, 2 | a READ follows an earlier atomic of its connection |
//! | overlapped | 2, 2 | an atomic follows an earlier WRITE of its connection |
//! | async | 1, 1 | the same, and two sets of buffers |
//! | unlatch | 1, none | the lines of a WRITE land in the order of their addresses; only the holder uses FETCH-ADD |
//!
//! A client uses one connection with the node, since verbs of different connections have no order.
//!
//! An operation whose future is dropped releases its latch, as long as the client's task runs: see [`Latched::keeper`].
//! A latch has no owner. If a client dies or loses its session while it holds a latch or tries to take one, the latch
//! stays as it is, and later operations on the object fail with [`LatchError::Busy`]. In a store with leases, which are
//! an option of exclusive latches, other clients fence such a client, and recover its latches (module `leased`).
//!
//! Invariant: a client sends an object's WRITE and the release only while it holds the object's latch exclusively.
//! Invariant: whether a client has taken a latch is decided by the result of its atomic, never by bytes of a READ.
//! Invariant: a buffer is reused only after the requests that use it have completed.

pub mod btree;
pub mod mutants;
pub mod scheme;
pub mod system;

mod error;
mod keeper;
mod lane;
mod layout;
mod leased;
mod optimistic;

pub use error::LatchError;
pub use layout::{LEN_MAX, Latching, OBJECTS_MAX, Placement, Spec};
pub use leased::LeaseSpec;
pub use scheme::Scheme;

use crate::lease::LockWord;
use crate::redo::{self, Record};
use crate::system::Backoff;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::{
    Addr, Chain, ChainBuf, Fabric, Mode, NodeId, Out, Reply, Status, cas, fetch_add, read, write,
};
use keeper::{Keeping, Kept};
use lane::{Lane, Step};
use layout::{Layout, Object};
use leased::Leased;
use scheme::{Steps, Word};
use std::cell::{Cell, RefCell};
use std::future::poll_fn;
use std::rc::Rc;
use std::time::Duration;
use zerocopy::little_endian::U64;

/// Kind of the store in the catalog.
pub const KIND: &str = "latch";

/// Time for which an operation tries to take a latch or to read an object whole, unless the options have another.
const PATIENCE: Duration = Duration::from_secs(5);

/// Number of failed attempts after which the lease of a latch's holder is of interest.
const SUSPECT_AFTER: u32 = 8;

/// Word of a latch that nobody holds.
const FREE: U64 = U64::ZERO;
/// Word of a held exclusive latch.
const HELD: U64 = U64::new(1);
/// Bit of a reader/writer latch that a writer holds.
const WRITER: u64 = 1 << 60;
const HELD_BY_WRITER: U64 = U64::new(WRITER);
/// What a reader adds to a reader/writer latch.
const READER: U64 = U64::new(1);

/// Handle of a client of one store. It runs one operation at a time: give each task its own, by [`Latched::another`].
pub struct Latched<F> {
    client: Rc<Client<F>>,
    lanes: [Rc<Lane>; 2],
    /// Index of the next operation's lane.
    next: usize,
    content: Vec<u8>,
}

/// Client of one store, which its handles, its task and its lanes share.
struct Client<F> {
    fabric: Rc<F>,
    node: NodeId,
    layout: Layout,
    backoff: Backoff,
    /// Time for which an operation tries to take a latch, or to read an object whole.
    patience: Duration,
    draws: RefCell<Draws>,
    /// Number of attempts that failed, of all operations.
    retries: Cell<u64>,
    handles: Cell<usize>,
    /// Number of the client's tasks that the program has, whether they run yet or not. One of them runs at a time.
    keepers: Cell<usize>,
    kept: RefCell<Kept>,
    /// The client's lease, if the store has leases.
    leased: Option<Leased<F>>,
}

/// Buffers of a lane.
#[derive(Default)]
struct Buffers {
    chain: ChainBuf,
    reply: Reply,
    /// Image of the object.
    image: Vec<u8>,
    /// Word of the latch while the lane holds it.
    word: U64,
    /// Record of the image, if the store has leases.
    record: Record,
}

/// How an operation holds a latch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hold {
    Exclusive,
    Shared,
}

impl<F: Fabric + Clock + 'static> Latched<F> {
    /// Changes an object while no other client holds its latch. `body` gets the content, and may wait.
    ///
    /// In schemes that do not await the WRITE, this function returns once the WRITE was sent, or has run if the
    /// client's own CPU runs its chains. The change counts as done only when the WRITE has completed: see
    /// [`Latched::settle`]. If the future is dropped before `body` has returned, nothing is changed; if it is dropped
    /// later, the change is completed.
    ///
    /// # Errors
    /// [`LatchError`]; it may be that of an earlier operation whose requests were not awaited. After
    /// [`LatchError::Fabric`] or [`LatchError::Refused`], the latch may be held for ever.
    pub async fn with_exclusive<T>(
        &mut self,
        object: u64,
        body: impl AsyncFnOnce(&mut [u8]) -> T,
    ) -> Result<T, LatchError> {
        let object = self.object(object)?;
        let mut content = std::mem::take(&mut self.content);
        let operation = self.begin(object, Hold::Exclusive).await?;
        let layout = &operation.client.layout;
        layout.unpack(&operation.lane.buffers().borrow().image, &mut content);
        let output = body(&mut content).await;
        let unlatches = operation.client.unlatches();
        {
            let mut own = operation.lane.buffers().borrow_mut();
            let latch = if unlatches { FREE } else { own.word };
            layout.pack(&content, &mut own.image, latch.get());
        }
        let last = match layout.spec.scheme.steps {
            Steps::Basic | Steps::Speculative => Last::WriteThenRelease,
            Steps::Unlatch if unlatches => Last::Write,
            Steps::Overlapped | Steps::Async | Steps::Unlatch => Last::WriteAndRelease,
        };
        let is_awaited = operation.end(last).await?;
        self.next ^= usize::from(!is_awaited);
        self.content = content;
        Ok(output)
    }

    /// Reads an object while no client holds its latch exclusively. `body` gets the content, and may wait. If the
    /// scheme has no shared mode, no other client can read the object by this function meanwhile.
    ///
    /// # Errors
    /// [`LatchError`], as [`Latched::with_exclusive`].
    pub async fn with_shared<T>(
        &mut self,
        object: u64,
        body: impl AsyncFnOnce(&[u8]) -> T,
    ) -> Result<T, LatchError> {
        let object = self.object(object)?;
        let mut content = std::mem::take(&mut self.content);
        let operation = self.begin(object, Hold::Shared).await?;
        operation.client.layout.unpack(&operation.lane.buffers().borrow().image, &mut content);
        let output = body(&content).await;
        let is_awaited = operation.end(Last::Release(Hold::Shared)).await?;
        self.next ^= usize::from(!is_awaited);
        self.content = content;
        Ok(output)
    }

    /// Reads an object's content in the way of the store's scheme: without the latch if the scheme is optimistic.
    ///
    /// # Errors
    /// [`LatchError`]. In an optimistic scheme, no latch is held after any error. In a store with leases, the read may
    /// have recovered the latch of a dead client. If that has failed, the client gives up its lease, and others recover
    /// the latch.
    pub async fn read(&mut self, object: u64, into: &mut [u8]) -> Result<(), LatchError> {
        let layout = &self.client.layout;
        if into.len() != layout.spec.len as usize {
            return Err(LatchError::Length(layout.spec.len));
        }
        if !layout.spec.scheme.is_optimistic() {
            return self.with_shared(object, async |content| into.copy_from_slice(content)).await;
        }
        let object = self.object(object)?;
        self.read_beside(into, async |client, own, lane| client.read_optimistically(&object, own, lane).await)
            .await
    }

    /// Reads an object's content by one READ, which nothing checks. The content is right only if no client changes the
    /// object meanwhile; otherwise, it may be torn. For baselines of benchmarks.
    ///
    /// # Errors
    /// [`LatchError`].
    pub async fn read_unsynchronized(&mut self, object: u64, into: &mut [u8]) -> Result<(), LatchError> {
        let layout = &self.client.layout;
        if into.len() != layout.spec.len as usize {
            return Err(LatchError::Length(layout.spec.len));
        }
        let object = self.object(object)?;
        self.read_beside(into, async |client, own, _lane| client.read_image(&object, own).await).await
    }

    /// Reads an object's content without its latch: `read` gets the image into the buffers. Meanwhile, the requests of
    /// an earlier operation go on.
    async fn read_beside(
        &mut self,
        into: &mut [u8],
        read: impl AsyncFnOnce(&Rc<Client<F>>, &mut Buffers, &Rc<Lane>) -> Result<(), LatchError>,
    ) -> Result<(), LatchError> {
        let lane = &self.lanes[self.next];
        self.client.settle(lane).await?;
        // A read that is dropped leaves nothing but its buffers. A recovery that it has begun belongs to the lane.
        let mut own = lane.buffers().take();
        let beside = &self.lanes[1 - self.next];
        let read = beside.beside(read(&self.client, &mut own, lane)).await;
        if read.is_ok() {
            self.client.layout.unpack(&own.image, &mut self.content);
            into.copy_from_slice(&self.content);
        }
        self.lanes[self.next].buffers().replace(own);
        read
    }

    /// Takes the latch of an object, and reads the object's image into the lane's buffers.
    async fn begin(&self, object: Object, hold: Hold) -> Result<Operation<F>, LatchError> {
        let (lane, beside) = (&self.lanes[self.next], &self.lanes[1 - self.next]);
        beside.beside(self.client.settle(lane)).await?;
        let (client, lane, beside) = (Rc::clone(&self.client), Rc::clone(lane), Rc::clone(beside));
        let mut operation = Operation { client, lane, beside, object, is_over: false };
        let taken = operation.lane.carry_out(&operation.client, Step::Take(object, hold));
        let taken = operation.beside.beside(taken).await;
        operation.is_over = taken.is_err();
        taken.map(|()| operation)
    }

    /// Waits until all requests that earlier operations of this handle have sent have completed. Call this function
    /// before the handle is dropped, unless the client's task runs ([`Latched::keeper`]).
    ///
    /// # Errors
    /// The first error of an earlier operation.
    pub async fn settle(&mut self) -> Result<(), LatchError> {
        // The next operation's lane has the older requests.
        let older = self.client.settle(&self.lanes[self.next]).await;
        older.and(self.client.settle(&self.lanes[1 - self.next]).await)
    }

    /// Recovers all dead clients of a store with leases. Takes about the length of a lease. In a store without leases,
    /// does nothing. If the future is dropped, the client's task goes on with the recovery.
    ///
    /// # Errors
    /// [`LatchError`]; some dead clients may have been recovered.
    pub async fn heal(&mut self) -> Result<(), LatchError> {
        self.settle().await?;
        self.client.carry_out(&self.lanes[self.next], Step::Heal).await
    }

    /// Returns the client's task, which renews the client's lease, if the store has leases, and releases the latches of
    /// operations whose futures are dropped from now on. It serves all handles of the client, and ends when the last
    /// one was dropped and no request is in flight. The program runs one such task beside the operations. Without it,
    /// a lease expires, and such a latch is released only when its handle is used again. If the program runs several,
    /// each waits until those before it have ended or were dropped.
    ///
    /// # Errors
    /// The first error of a request for which no caller has waited. The latch that it was about may be held.
    pub fn keeper(&self) -> impl Future<Output = Result<(), LatchError>> + use<F> {
        let keeping = Keeping::new(&self.client);
        async move {
            keeping.turn().await;
            let client = &keeping.client;
            let kept = poll_fn(|cx| client.poll_kept(cx));
            match &client.leased {
                None => kept.await,
                Some(leased) => {
                    leased.holder.renewing(kept, || ()).await;
                    leased.holder.release().await;
                }
            }
            client.kept.borrow_mut().unheard.take().map_or(Ok(()), Err)
        }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Latched<F> {
        Latched::of(&self.client)
    }
}

impl<F> Latched<F> {
    fn of(client: &Rc<Client<F>>) -> Latched<F> {
        client.handles.set(client.handles.get() + 1);
        let lane = || Lane::new(client.leased.as_ref().map(Leased::lane));
        let lanes = [lane(), lane()];
        Latched { client: Rc::clone(client), lanes, next: 0, content: Vec::new() }
    }

    /// Parameters of the store.
    pub fn spec(&self) -> &Spec {
        &self.client.layout.spec
    }

    /// Number of attempts of the client that failed so far: to take a latch that others held, or to read an object that
    /// was changed meanwhile.
    pub fn retries(&self) -> u64 {
        self.client.retries.get()
    }

    fn object(&self, number: u64) -> Result<Object, LatchError> {
        let layout = &self.client.layout;
        layout.object(number).ok_or(LatchError::NoSuchObject { object: number, objects: layout.spec.objects })
    }
}

impl<F> Drop for Latched<F> {
    fn drop(&mut self) {
        // Requests that nobody awaits.
        for lane in &self.lanes {
            lane.take_error().iter().for_each(|error| self.client.note_unheard(error));
            if lane.abandon() {
                self.client.adopt(lane);
                self.client.note_left();
            }
        }
        self.client.handles.set(self.client.handles.get() - 1);
        self.client.wake_keeper();
    }
}

/// An operation that holds a latch. If it is dropped, the client's task releases the latch.
struct Operation<F> {
    client: Rc<Client<F>>,
    lane: Rc<Lane>,
    /// The client's other lane.
    beside: Rc<Lane>,
    object: Object,
    is_over: bool,
}

impl<F: Fabric + Clock + 'static> Operation<F> {
    /// Sends the last requests. Returns whether they were awaited.
    async fn end(mut self, last: Last) -> Result<bool, LatchError> {
        let step = Step::End(self.object, last);
        let is_awaited = match (self.client.layout.spec.scheme.steps, last) {
            (Steps::Basic | Steps::Speculative | Steps::Overlapped, _) => true,
            (Steps::Async | Steps::Unlatch, _) => false,
        };
        if is_awaited {
            let ended = self.beside.beside(self.lane.carry_out(&self.client, step)).await;
            self.is_over = true;
            ended?;
        } else {
            self.beside.beside(self.lane.post(&self.client, step)).await;
            self.is_over = true;
        }
        Ok(is_awaited)
    }
}

impl<F> Drop for Operation<F> {
    fn drop(&mut self) {
        if !self.is_over && !mutants::DROPPED_KEEPS_LATCH.is_on() && self.lane.abandon() {
            self.client.adopt(&self.lane);
        }
    }
}

/// A step of a lane that its caller waits for. If the wait is dropped, the client's task goes on with the step.
struct Asked<'a, F> {
    client: &'a Client<F>,
    lane: &'a Rc<Lane>,
    is_over: bool,
}

impl<F> Drop for Asked<'_, F> {
    fn drop(&mut self) {
        if !self.is_over && self.lane.abandon() {
            self.client.adopt(self.lane);
        }
    }
}

/// A wait for a lane that the client's task may have polled before. If the wait is dropped, the task goes on.
struct Waiting<'a, F> {
    client: &'a Client<F>,
    is_over: bool,
}

impl<F> Drop for Waiting<'_, F> {
    fn drop(&mut self) {
        if !self.is_over {
            self.client.wake_keeper();
        }
    }
}

impl<F> Client<F> {
    /// Notes that a request has failed while the client held a latch. The client gives up its lease, unless the latch
    /// was taken from it.
    fn note_held(&self, error: &LatchError) {
        if !matches!(error, LatchError::Damaged(_)) {
            self.give_up();
        }
    }

    /// Notes that a lane may hold a latch and that its handle has gone. If no task releases it, the client gives up its
    /// lease.
    fn note_left(&self) {
        if self.keepers.get() == 0 {
            self.give_up();
        }
    }

    /// Gives up the client's lease, if it has one, so that others recover its latches.
    fn give_up(&self) {
        if let Some(leased) = &self.leased {
            leased.holder.give_up();
        }
    }

    /// Notes an error for which no caller waits.
    fn note_unheard(&self, error: &LatchError) {
        if *error != LatchError::Busy {
            self.kept.borrow_mut().unheard.get_or_insert_with(|| error.clone());
        }
    }

    /// Waits until no step of a lane is in progress.
    ///
    /// # Errors
    /// The error of a step that was not awaited.
    async fn settle(&self, lane: &Lane) -> Result<(), LatchError> {
        let mut waiting = Waiting { client: self, is_over: false };
        let settled = lane.settle().await;
        waiting.is_over = true;
        settled
    }
}

impl<F: Fabric + Clock + 'static> Client<F> {
    /// Lets a lane carry out a step that leaves it without a latch.
    async fn carry_out(self: &Rc<Self>, lane: &Rc<Lane>, step: Step) -> Result<(), LatchError> {
        let mut asked = Asked { client: self, lane, is_over: false };
        let ended = lane.carry_out(self, step).await;
        asked.is_over = true;
        ended
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Kind of the latch words.
    fn word(&self) -> Word {
        match self.layout.spec.scheme {
            // A latch with a lease is never taken by FETCH-ADD.
            Scheme { steps: Steps::Unlatch, .. }
                if mutants::UNLATCH_UNDER_FAA.is_on() && self.leased.is_none() =>
            {
                Word::ReaderWriter
            }
            Scheme { word, .. } => word,
        }
    }

    /// Whether the WRITE releases the latch.
    fn unlatches(&self) -> bool {
        let is_ordered = self.layout.is_ordered() || mutants::UNLATCH_OUT_OF_ORDER.is_on();
        self.layout.spec.scheme.steps == Steps::Unlatch && is_ordered
    }

    /// Takes the latch, and reads the image into `own`. Tries no more once `is_abandoned` returns true.
    async fn take_latch(
        &self,
        object: &Object,
        hold: Hold,
        own: &mut Buffers,
        (lane, is_abandoned): (u16, impl Fn() -> bool),
    ) -> Result<(), LatchError> {
        let is_speculative = self.layout.spec.scheme.steps >= Steps::Speculative;
        let key = self.layout.table.key;
        let mut attempts = Attempts::new(self.backoff);
        own.word = match (&self.leased, self.word()) {
            (Some(leased), _) => self.next_word(leased, lane).await?.bits(),
            (None, Word::Exclusive) => HELD,
            (None, Word::ReaderWriter) => HELD_BY_WRITER,
        };
        loop {
            let mut chain = own.chain.begin(key);
            let found = match (self.word(), hold) {
                (Word::Exclusive, _) | (Word::ReaderWriter, Hold::Exclusive) => {
                    chain.also(cas(Mode::Eq, object.latch, &FREE, &own.word))
                }
                (Word::ReaderWriter, Hold::Shared) => chain.also(fetch_add(object.latch, &READER)),
            };
            let image = is_speculative.then(|| chain.also(read(object.image, self.layout.image_len())));
            let ran = self.fabric.run(self.node, &chain, &mut own.reply).await;
            ran.inspect_err(|error| {
                if error.ran() != Ran::No {
                    self.give_up();
                }
            })?;
            let mut found = own.reply.get(found).map_err(LatchError::Refused)?.get();
            let copied = image.map_or(Ok(()), |image| copy(&own.reply, image, &mut own.image));
            if is_speculative && mutants::READ_OVER_RESULT.is_on() {
                found = self.layout.latch_of(&own.image).unwrap_or(found);
            }
            let is_taken = match hold {
                Hold::Shared if self.word() == Word::ReaderWriter => found < WRITER,
                _ => found == FREE.get(),
            };
            if is_taken {
                let read = if is_speculative { copied } else { self.read_image(object, own).await };
                return read.inspect_err(|error| self.note_held(error));
            }
            copied?;
            if hold == Hold::Shared && self.word() == Word::ReaderWriter {
                self.send(Last::Release(hold), object, own, &Cell::new(false)).await?;
            }
            if is_abandoned() {
                return Err(LatchError::Busy);
            }
            self.note_failure_of(&mut attempts)?;
            if self.suspects(&attempts, found) {
                self.wait_for_holder(lane, object, found).await?;
            } else {
                self.back_off(&mut attempts).await;
            }
        }
    }

    async fn read_image(&self, object: &Object, own: &mut Buffers) -> Result<(), LatchError> {
        let mut chain = own.chain.begin(self.layout.table.key);
        let image = chain.also(read(object.image, self.layout.image_len()));
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        copy(&own.reply, image, &mut own.image)
    }

    /// Sends requests that end an operation, and waits for them. Sets `is_posted` once they may run although nobody
    /// waits.
    async fn send(
        &self,
        last: Last,
        object: &Object,
        own: &mut Buffers,
        is_posted: &Cell<bool>,
    ) -> Result<(), LatchError> {
        let sent = match last {
            Last::WriteThenRelease => self.write_then_release(object, own, is_posted).await,
            last => self.send_one(last, object, own, is_posted).await,
        };
        sent.inspect_err(|error| self.note_held(error))
    }

    async fn write_then_release(
        &self,
        object: &Object,
        own: &mut Buffers,
        is_posted: &Cell<bool>,
    ) -> Result<(), LatchError> {
        self.send_one(Last::Write, object, own, &Cell::new(false)).await?;
        let released = self.send_one(Last::Release(Hold::Exclusive), object, own, is_posted).await;
        released.map_err(|error| error.after_write(self.node))
    }

    /// Sends a list of requests, and waits for them.
    async fn send_one(
        &self,
        last: Last,
        object: &Object,
        Buffers { chain, reply, image, word, record }: &mut Buffers,
        is_posted: &Cell<bool>,
    ) -> Result<(), LatchError> {
        let mut chain = chain.begin(self.layout.table.key);
        if let Last::Write | Last::WriteAndRelease = last {
            if let Some(leased) = &self.leased {
                record.fill(LockWord::of_bits(word.get()), &self.layout.guarded(object), image);
                let record_write = write(leased.areas().record(record.word()), record.as_bytes());
                if redo::mutants::RECORD_AFTER_OBJECT.is_on() {
                    chain.also(write(object.image, image));
                }
                chain.also(record_write);
            }
            let written = chain.also(write(object.image, image));
            chain.holds(&[], written, is_posted);
        }
        let hold = match last {
            Last::Write => None,
            Last::Release(hold) => Some(hold),
            Last::WriteAndRelease | Last::WriteThenRelease => Some(Hold::Exclusive),
        };
        let mut freed = None;
        match hold {
            None => {}
            Some(_) if self.leased.is_some() => {
                let by = *freed.insert(chain.also(cas(Mode::Eq, object.latch, word, &FREE)));
                chain.holds(&[], by, is_posted);
            }
            Some(hold) => release(&mut chain, object.latch, self.word(), hold, is_posted),
        }
        self.fabric.run(self.node, &chain, reply).await?;
        if freed.is_some_and(|freed| reply.status(freed) == Status::CasFailed) {
            return Err(LatchError::Damaged("a latch was taken from its living holder"));
        }
        match reply.verdict() {
            Status::Ok => Ok(()),
            refused => Err(LatchError::Refused(refused)),
        }
    }

    /// Counts a failed attempt.
    ///
    /// # Errors
    /// [`LatchError::Busy`] if the operation has tried for long enough.
    fn note_failure_of(&self, attempts: &mut Attempts) -> Result<(), LatchError> {
        self.retries.set(self.retries.get() + 1);
        attempts.failed += 1;
        let now = self.fabric.now();
        if now >= *attempts.until.get_or_insert(now + self.patience) { Err(LatchError::Busy) } else { Ok(()) }
    }

    /// Whether the holder of a latch may be dead. After the failed attempts, the latch had the word `latch`.
    fn suspects(&self, attempts: &Attempts, latch: u64) -> bool {
        self.leased.is_some() && attempts.failed > SUSPECT_AFTER && latch != FREE.get()
    }

    /// Pauses after a failed attempt. The pause is random, below a limit that doubles with each attempt.
    async fn back_off(&self, attempts: &mut Attempts) {
        let limit = attempts.pause;
        if limit > Duration::ZERO {
            let pause_ns = self.draws.borrow_mut().below(limit.as_nanos() as u64 + 1);
            self.fabric.sleep(Duration::from_nanos(pause_ns)).await;
            attempts.pause = (limit * 2).min(self.backoff.longest);
        }
    }
}

/// The failed attempts of an operation to take a latch, or to read an object whole.
struct Attempts {
    failed: u32,
    /// When the operation gives up, once an attempt has failed.
    until: Option<Duration>,
    /// Limit of the next pause.
    pause: Duration,
}

impl Attempts {
    fn new(backoff: Backoff) -> Attempts {
        Attempts { failed: 0, until: None, pause: backoff.first }
    }
}

/// Requests that end an operation.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Last {
    Write,
    Release(Hold),
    /// Both, sent together.
    WriteAndRelease,
    /// Both, the second one sent once the first one has completed.
    WriteThenRelease,
}

/// Adds the op that releases a latch. Sets `is_posted` once the chain may run although nobody waits.
fn release<'a>(chain: &mut Chain<'a>, latch: Addr, word: Word, hold: Hold, is_posted: &'a Cell<bool>) {
    /// What the holder subtracts, as what it adds modulo 2^64.
    const EXCLUSIVE: U64 = U64::new(1u64.wrapping_neg());
    const WRITERS: U64 = U64::new(WRITER.wrapping_neg());
    const READERS: U64 = U64::new(1u64.wrapping_neg());
    let subtrahend = match (word, hold) {
        (Word::Exclusive, _) => &EXCLUSIVE,
        (Word::ReaderWriter, Hold::Exclusive) if mutants::RELEASED_BY_WRITE.is_on() => {
            chain.also(write(latch, &[0; 8]));
            return;
        }
        // A reader that tries to take the latch has added to the word, and subtracts again.
        (Word::ReaderWriter, Hold::Exclusive) => &WRITERS,
        (Word::ReaderWriter, Hold::Shared) => &READERS,
    };
    let released = chain.also(fetch_add(latch, subtrahend));
    chain.holds(&[], released, is_posted);
}

/// Copies the output of a READ.
fn copy(reply: &Reply, from: Out<[u8]>, into: &mut Vec<u8>) -> Result<(), LatchError> {
    let bytes = reply.get(from).map_err(LatchError::Refused)?;
    into.clear();
    into.extend_from_slice(bytes);
    Ok(())
}

/// Returns the objects whose latches are not free, with the latches' words, for audits of a store that no client uses.
/// `load` returns the 8-byte word at an address.
///
/// # Errors
/// The store's parameters are invalid.
pub fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
    let layout = Layout::new(&store.parameters, store.extent())?;
    let latches = (0..layout.spec.objects).filter_map(|number| Some((number, layout.object(number)?)));
    let words = latches.map(|(number, object)| (number, load(object.latch.raw())));
    Ok(words.filter(|(_, word)| *word != FREE.get()).collect())
}
