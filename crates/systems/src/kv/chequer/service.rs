//! Work of the memory node's CPU for a Chequer store: puts, deletes and reservations, and gets by call.
//!
//! A put or delete has two parts, with the log's record in between ([`Service::call`], [`Service::finish`]). The first
//! chooses the bucket, draws the stamp, and writes the value to a block that no reader knows. The second writes the
//! record in place, and frees the block of the value before.
//!
//! Each partition has its own lock, allocator and stamps. Work on one partition runs one piece after another.
//!
//! Invariant: a stamp is greater than every other stamp of its partition that was drawn before it, also by an earlier
//! node, and so is its counter. An epoch begins when a node takes the memory over, or replays a log into new memory; it
//! is written to the partition's head before its first stamp is drawn.
//! Invariant: the counter of the last installed stamp is in the partition's head or in a record. That of a put or
//! delete is in its record, or in one that has replaced it; those of a replayed log are in the head.
//! Invariant: while a put or delete is between its parts, its bucket belongs to its key (`Pending`). No record is
//! behind such a bucket on the path of its own key while the bucket looks as if it never had a record.
//! Invariant: a reserved block is freed only once no WRITE to it can be on its way: its session has ended, or its
//! client says that its WRITEs were answered.
//! Invariant: a block that is held for a client's reads (`Held`) is freed only once the hold has ended, although its
//! value was replaced. A hold ends by its client, with its session, or after `HOLD_TIME`: a late read is refused.
//! Invariant: the allocator's state, the stamps, the reservations and the holds are in the node's process. A node that
//! takes over rebuilds the first two from the table ([`Service::recover`]), and the others end with the sessions of the
//! node before.

mod checkpoint;
mod recover;
mod replay;
mod take_back;

use super::layout::{
    BLOCK_ALIGN, BLOCK_BUCKETS_MAX, Block, Bucket, KeyField, LENGTH_SIZE, REDO_OFFSET, Record, Redo, Spec,
    Stamp, Table, Used, block_len, crc, key_in_block, put_block,
};
use super::log::{self, Logged};
use super::mutants;
use super::pool::{self, ClaimError, Pool, Stat};
use super::request::{Answer, Outcome, PART_MAX, PARTITION_BITS, Request};
use farside_remote::fabric::DEADLINE;
use farside_remote::service::{Call, Context, Extent, Locks, Plan, Records, Service, Work};
use farside_remote::{Memory, Rights};
use replay::{Lates, NO_BUCKET};
use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use take_back::Unanswered;
use zerocopy::little_endian::U64;
use zerocopy::{FromZeros, IntoBytes};

/// Plans a store of `kind`, which is one of Chequer's.
pub(super) fn plan(kind: &str, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
    let spec = Spec::plan(kind, parameters, quota, entropy)?;
    let table_len = crate::hash_slots::Spec::table_len(&spec).ok_or_else(|| {
        format!("a {kind} store of this size does not fit into any memory: give fewer --items or a smaller --quota")
    })?;
    let parameters = serde_json::to_string(&spec).expect("plain data");
    Ok(Plan { table_len, parameters, wide: false })
}

/// Service of a store of any of Chequer's kinds.
pub struct ChequerService {
    kind: &'static str,
    table: Table,
    partitions: Box<[Mutex<Partition>]>,
}

/// The state of a partition that lies in the node's process.
struct Partition {
    pool: Pool,
    /// Time of the last call.
    now: Duration,
    /// The last stamp that was drawn.
    last: Stamp,
    begun: BegunCall,
    /// The puts and deletes between their parts, by bucket.
    pending: BTreeMap<u64, Pending>,
    /// Empty [`Pending`]s, whose buffers are reused: a put allocates none.
    spare: Vec<Pending>,
    /// The reservations, by session and number. The session is `None` for clients in the node's process that have none.
    reservations: BTreeMap<(Option<u32>, u64), Reservation>,
    /// Sum of the lengths of the reserved blocks.
    reserved: u64,
    /// The values that are held for clients which read them by several calls.
    holds: Vec<Held>,
    late: Lates,
    unanswered: Unanswered,
}

/// What the call in progress has drawn. Memory may make it wait and run again, and it then gets the same.
#[derive(Default)]
struct BegunCall {
    /// Random number of the call.
    token: u64,
    block: Option<Block>,
    stamp: Option<Stamp>,
    reservation: Option<((Option<u32>, u64), Reservation)>,
}

/// The puts and deletes of one key that are between their parts.
#[derive(Default)]
struct Pending {
    key: Vec<u8>,
    operations: Vec<Operation>,
    /// Stamp of the newest that was installed since the first of them began.
    installed: Stamp,
}

/// A put or delete between its parts.
#[derive(Clone, Copy)]
struct Operation {
    stamp: Stamp,
    /// The value's block with its CRC; `None` for a delete.
    value: Option<(Block, u64)>,
}

/// A block that a client writes.
#[derive(Clone)]
struct Reservation {
    key: Vec<u8>,
    block: Block,
    crc: u64,
    /// Time of the reservation.
    since: Duration,
}

/// A value that a client reads by several calls. Its block is not freed before the hold has ended.
#[derive(Clone, Copy)]
struct Held {
    /// Number of the client's session; `None` for a client in the node's process that has none.
    session: Option<u32>,
    used: Used,
    /// Time at which the hold ends, unless the client has ended it before.
    until: Duration,
    /// Whether the value was replaced, so that the last hold of its block frees the block.
    is_replaced: bool,
}

/// Longest time for which a value is held for a client.
const HOLD_TIME: Duration = DEADLINE;
/// Largest number of holds of a partition.
const HOLDS_MAX: usize = 64;
/// The held blocks together take at most the area of values divided by this, unless there is only one.
const HOLDS_SHARE: u64 = 4;

/// Largest number of reservations of a session in one partition. A client has one reservation at a time.
pub const RESERVATIONS_MAX: usize = 256;

/// Result of a search for a key.
#[derive(Default)]
struct Found {
    /// The key's bucket, if the key has a value, or a put or delete between its parts.
    bucket: Option<u64>,
    /// The record in that bucket, if the key has a value.
    used: Option<Used>,
    /// First bucket on the path that belongs to no key.
    vacant: Option<u64>,
    /// Buckets on the path that never had a record, and belong to other keys whose puts are between their parts.
    passed: Vec<u64>,
    /// Whether a record on the path is damaged. Its content is lost, so its bucket counts as vacant.
    is_damaged: bool,
}

/// First part of a put or delete, as it is kept until the second part.
#[derive(Clone, Copy)]
struct Change<'a> {
    partition: u64,
    bucket: u64,
    key: &'a [u8],
    operation: Operation,
    /// Whether the key had a value before.
    existed: bool,
}

impl ChequerService {
    /// Creates the service of a store of `kind`.
    ///
    /// # Errors
    /// The parameters are not those of a plan.
    pub(super) fn new(kind: &'static str, parameters: &str, table: Extent) -> Result<ChequerService, String> {
        let table = Table::new(parameters, table)?;
        let partition = |index| Partition::new(Pool::new(table.area(index).start, table.spec().area));
        let partitions = (0..table.spec().partitions).map(partition).map(Mutex::new).collect();
        Ok(ChequerService { kind, table, partitions })
    }

    fn partition(&self, index: u64) -> MutexGuard<'_, Partition> {
        self.partitions[index as usize].lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The partition of a reservation. Its number is untrusted input.
    fn partition_of_number(&self, number: u64) -> u64 {
        number % (1 << PARTITION_BITS) % self.table.spec().partitions
    }

    fn partition_of(&self, request: &Request<'_>) -> u64 {
        match *request {
            Request::Get { key, .. }
            | Request::Contains { key }
            | Request::Put { key, .. }
            | Request::Delete { key }
            | Request::Reserve { key, .. }
            | Request::Hold { key }
            | Request::Release { key, .. } => self.table.home(key).partition,
            Request::Write { number, .. } | Request::Commit { number } | Request::Withdraw { number } => {
                self.partition_of_number(number)
            }
        }
    }
}

impl<M: Memory> Service<M> for ChequerService {
    fn call(
        &self,
        context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let request = match Request::decode(call.request) {
            Ok(request) => request,
            Err(wrong) => return Ok(Err(wrong)),
        };
        let (needed, word) =
            if request.changes() { (Rights::WRITE, "write") } else { (Rights::READ, "read") };
        if !call.rights.contains(needed) {
            return Ok(Err(format!(
                "this operation on a {} store needs the right '{word}', which your token lacks: ask the operator of \
                 the node",
                self.kind
            )));
        }
        let Context { memory, now, mut random, scratch, log } = context;
        let index = self.partition_of(&request);
        let mut partition = self.partition(index);
        partition.begin(random.next(), now);
        let state = &mut *partition;
        let mut at = At { table: &self.table, index, memory, state, now, scratch };
        let outcome = match request {
            Request::Get { key, offset, stamp } => {
                at.get(key, offset, stamp, call.session, answer)?;
                return Ok(Ok(()));
            }
            Request::Hold { key } => {
                at.hold(key, call.session, answer)?;
                return Ok(Ok(()));
            }
            Request::Release { key, stamp } => Err(at.end_hold(key, stamp, call.session)),
            Request::Contains { key } => at.contains(key)?,
            Request::Put { key, value } => at.put(key, value, log, answer)?,
            Request::Delete { key } => at.delete(key, log, answer)?,
            Request::Reserve { key, number, len, crc } => {
                at.reserve(key, (call.session, number), len, crc, answer)?
            }
            Request::Write { number, offset, bytes } => at.write(number, offset, bytes, call.session)?,
            Request::Commit { number } => at.commit(number, call.session, log, answer)?,
            Request::Withdraw { number } => Err(at.withdraw(number, call.session)),
        };
        if let Err(outcome) = outcome {
            Answer::of(outcome).encode(answer);
        }
        Ok(Ok(()))
    }

    fn finish(
        &self,
        context: Context<'_, M>,
        begun: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let change = Change::decode(begun);
        let Context { memory, now, scratch, .. } = context;
        let mut partition = self.partition(change.partition);
        partition.end(now);
        let state = &mut *partition;
        let mut at = At { table: &self.table, index: change.partition, memory, state, now, scratch };
        at.finish(change)?;
        let outcome =
            if change.existed || change.operation.value.is_some() { Outcome::Done } else { Outcome::Absent };
        Answer { stamp: change.operation.stamp, ..Answer::of(outcome) }.encode(answer);
        Ok(Ok(()))
    }

    fn undo(&self, context: Context<'_, M>, begun: &[u8]) -> Result<(), M::Wait> {
        let change = Change::decode(begun);
        let mut partition = self.partition(change.partition);
        partition.end(context.now);
        partition.forget(&change, false);
        if let Some((block, _)) = change.operation.value {
            partition.release(block);
        }
        Ok(())
    }

    fn replay(&self, context: Context<'_, M>, record: &[u8]) -> Result<Result<(), String>, M::Wait> {
        let Context { memory, now, mut random, scratch, .. } = context;
        if let Some((index, stamp)) = log::last(record) {
            if index >= self.table.spec().partitions {
                return Ok(Err(NO_BUCKET.to_owned()));
            }
            self.partition(index).pass(stamp);
            return Ok(Ok(()));
        }
        let logged = match Logged::decode(record) {
            Ok(logged) => logged,
            Err(wrong) => return Ok(Err(wrong)),
        };
        let index = self.table.home(logged.key).partition;
        let mut partition = self.partition(index);
        partition.begin(random.next(), now);
        let state = &mut *partition;
        At { table: &self.table, index, memory, state, now, scratch }.replay(logged)
    }

    fn replayed(&self, context: Context<'_, M>) -> Result<u64, M::Wait> {
        let Context { memory, now, scratch, .. } = context;
        let mut dropped = 0;
        for index in 0..self.table.spec().partitions {
            let mut partition = self.partition(index);
            let state = &mut *partition;
            dropped += At { table: &self.table, index, memory, state, now, scratch }.replayed()?;
        }
        Ok(dropped)
    }

    fn check(&self, record: &[u8]) -> Result<(), String> {
        if let Some((index, _)) = log::last(record) {
            return if index < self.table.spec().partitions { Ok(()) } else { Err(NO_BUCKET.to_owned()) };
        }
        let logged = Logged::decode(record)?;
        let index = self.table.home(logged.key).partition;
        replay::check(&self.table, &self.partition(index).pool, &logged)
    }

    fn compare(&self, memory: &M, record: &[u8]) -> Result<(), M::Wait> {
        // The checkpoint that follows leaves out what is invalid.
        let Ok(logged) = Logged::decode(record) else { return Ok(()) };
        let index = self.table.home(logged.key).partition;
        let mut partition = self.partition(index);
        let (state, now) = (&mut *partition, Duration::ZERO);
        At { table: &self.table, index, memory, state, now, scratch: &mut Vec::new() }.compare(&logged)
    }

    fn take_back(&self, memory: &M, records: &mut Records) -> Result<bool, M::Wait> {
        for index in 0..self.table.spec().partitions {
            let mut partition = self.partition(index);
            let (state, now) = (&mut *partition, Duration::ZERO);
            let mut at = At { table: &self.table, index, memory, state, now, scratch: &mut Vec::new() };
            if at.take_back(records)? {
                return Ok(true);
            }
        }
        Ok(false)
    }

    fn checkpoint(&self, memory: &M, cursor: u64, records: &mut Records) -> Result<Option<u64>, M::Wait> {
        let buckets = self.table.spec().buckets();
        let index = cursor / buckets;
        let mut partition = self.partition(index);
        let (state, now) = (&mut *partition, Duration::ZERO);
        let mut at = At { table: &self.table, index, memory, state, now, scratch: &mut Vec::new() };
        let next = cursor - cursor % buckets + at.checkpoint(cursor % buckets, records)?;
        let end =
            if mutants::CHECKPOINT_OF_ONE_PARTITION.is_on() { buckets } else { self.table.spec().slots };
        Ok((next < end).then_some(next))
    }

    fn locks(&self, work: Work<'_>) -> Locks {
        match work {
            Work::Call(request) => match Request::decode(request) {
                Ok(request) => Locks::of(self.partition_of(&request)),
                Err(_) => Locks::NONE, // The call does nothing.
            },
            Work::Finish(begun) => Locks::of(Change::decode(begun).partition),
            Work::Live => Locks::ALL,
            Work::Tick => Locks::NONE, // Ticks do nothing.
        }
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // All of the store lies in its table.
    }

    fn sessions_ended(&self, gone: &dyn Fn(u32) -> bool) {
        for index in 0..self.table.spec().partitions {
            let mut partition = self.partition(index);
            if !mutants::RESERVATION_OUTLIVES_SESSION.is_on() {
                partition.release_reservations(|session, _| session.is_some_and(gone));
            }
            partition.end_holds(|held| held.session.is_some_and(gone));
        }
    }

    fn recover(&self, memory: &M, cursor: u64) -> Result<Result<Option<u64>, String>, M::Wait> {
        let buckets = self.table.spec().buckets();
        let index = cursor / buckets;
        let mut partition = self.partition(index);
        let (state, now) = (&mut *partition, Duration::ZERO);
        let mut at = At { table: &self.table, index, memory, state, now, scratch: &mut Vec::new() };
        let next = cursor - cursor % buckets + at.recover(cursor % buckets)?;
        Ok(Ok((next < self.table.spec().slots).then_some(next)))
    }

    fn report(&self) -> Vec<(&'static str, u64)> {
        let mut total = Stat::default();
        let (mut reservations, mut reserved) = (0, 0);
        for index in 0..self.table.spec().partitions {
            let partition = self.partition(index);
            total.add(&partition.pool.stat());
            reservations += partition.reservations.len() as u64;
            reserved += partition.reserved;
        }
        let mut rows = total.rows();
        rows.extend([("reservations", reservations), ("reserved_bytes", reserved)]);
        rows
    }
}

impl Partition {
    fn new(pool: Pool) -> Partition {
        Partition {
            pool,
            now: Duration::ZERO,
            last: Stamp(0),
            begun: BegunCall::default(),
            pending: BTreeMap::new(),
            spare: Vec::new(),
            reservations: BTreeMap::new(),
            reserved: 0,
            holds: Vec::new(),
            late: Lates::default(),
            unanswered: Unanswered::new(),
        }
    }

    /// Begins a call, or runs the same call again.
    fn begin(&mut self, token: u64, now: Duration) {
        self.now = now;
        if self.begun.token == token {
            return;
        }
        let BegunCall { block, reservation, .. } =
            std::mem::replace(&mut self.begun, BegunCall { token, ..BegunCall::default() });
        // A call that never came to its end, because its node has stopped serving calls.
        if let Some(block) = block {
            self.release(block);
        }
        if let Some((number, reservation)) = reservation {
            self.keep(number, reservation);
        }
        self.end_holds(|held| held.until <= now);
        if mutants::RESERVATION_FREED_BY_TIMEOUT.is_on() {
            const TIMEOUT: Duration = Duration::from_micros(20);
            self.release_reservations(|_, of| of.since + TIMEOUT < now);
        }
    }

    /// Begins the second part of a call. It frees the blocks that the call no longer needs, and so their quarantine
    /// begins here: the first part may be long ago.
    fn end(&mut self, now: Duration) {
        if !mutants::QUARANTINE_FROM_BEGIN.is_on() {
            self.now = self.now.max(now);
        }
    }

    /// Takes a block for the call in progress.
    fn take(&mut self, len: usize, now: Duration) -> Option<Block> {
        if self.begun.block.is_none() {
            let taken = self.pool.take(len as u64, now);
            self.begun.block = taken.map(|pool::Block { at, len }| Block { at, len: len as u32 });
        }
        self.begun.block
    }

    /// Claims the block at a place of the log, for the record in progress.
    fn claim(&mut self, block: Block) -> Result<Block, ClaimError> {
        if let Some(block) = self.begun.block {
            return Ok(block);
        }
        self.pool.claim(of_pool(block))?;
        self.begun.block = Some(block);
        Ok(block)
    }

    /// Gives a block back, or leaves that to the end of its holds. Readers may still read it.
    fn release(&mut self, block: Block) {
        let mut is_held = false;
        for held in self.holds.iter_mut().filter(|held| held.used.block == block) {
            (held.is_replaced, is_held) = (true, true);
        }
        if !is_held {
            let _ = self.pool.release(of_pool(block), self.now);
        }
    }

    /// Holds a value for a client, if there are not too many holds.
    fn hold(&mut self, used: Used, session: Option<u32>, area: u64) {
        let held: u64 = self.holds.iter().map(|held| u64::from(held.used.block.len)).sum();
        let has_space = held + u64::from(used.block.len) <= area / HOLDS_SHARE;
        if self.holds.is_empty() || has_space && self.holds.len() < HOLDS_MAX {
            self.holds.push(Held { session, used, until: self.now + HOLD_TIME, is_replaced: false });
        }
    }

    /// The place of the hold of the value with this stamp, if a client of this session has one.
    fn held(&self, key: KeyField, stamp: Stamp, session: Option<u32>) -> Option<usize> {
        let is_it = |held: &Held| (held.session, held.used.stamp, held.used.key) == (session, stamp, key);
        self.holds.iter().position(is_it)
    }

    fn end_holds(&mut self, is_over: impl Fn(&Held) -> bool) {
        while let Some(place) = self.holds.iter().position(&is_over) {
            self.end_hold(place);
        }
    }

    fn end_hold(&mut self, place: usize) {
        let Held { used: Used { block, .. }, is_replaced, .. } = self.holds.swap_remove(place);
        if is_replaced && self.holds.iter().all(|held| held.used.block != block) {
            let _ = self.pool.release(of_pool(block), self.now);
        }
    }

    /// Draws the stamp of the call in progress, a put or delete. `is_new` says whether the key has no record.
    fn draw_stamp(&mut self, now: Duration, is_new: bool) -> Stamp {
        if let Some(stamp) = self.begun.stamp {
            return stamp;
        }
        let Stamp(last) = self.last;
        // The counter carries into the epoch, which the next node raises again.
        self.last = Stamp(last + 1);
        let stamp = if mutants::STAMP_BY_CLOCK.is_on() {
            Stamp(1 + now.as_millis() as u64)
        } else if mutants::STAMP_RESTARTS_AFTER_DELETE.is_on() && is_new {
            Stamp(1)
        } else {
            self.last
        };
        self.begun.stamp = Some(stamp);
        stamp
    }

    /// Makes all later stamps greater than `stamp`, which an earlier node has drawn.
    fn pass(&mut self, stamp: Stamp) {
        let epoch = self.last.epoch().max(stamp.epoch() + 1);
        self.last = Stamp::new(epoch, self.last.counter().max(stamp.counter()));
    }

    fn keep(&mut self, number: (Option<u32>, u64), reservation: Reservation) {
        self.reserved += u64::from(reservation.block.len);
        self.reservations.insert(number, reservation);
    }

    /// Removes a reservation of a session, if it has one of this number.
    fn remove(&mut self, number: (Option<u32>, u64)) -> Option<Reservation> {
        let reservation = self.reservations.remove(&number)?;
        self.reserved -= u64::from(reservation.block.len);
        Some(reservation)
    }

    fn release_reservations(&mut self, is_over: impl Fn(Option<u32>, &Reservation) -> bool) {
        // That of a COMMIT which found no value.
        let begun = &mut self.begun.reservation;
        if let Some((number, reservation)) = begun.take_if(|((session, _), of)| is_over(*session, of)) {
            self.keep(number, reservation);
        }
        let Partition { pool, reservations, reserved, now, .. } = self;
        reservations.retain(|&(session, _), reservation| {
            let ends = is_over(session, reservation);
            if ends {
                let _ = pool.release(of_pool(reservation.block), *now);
                *reserved -= u64::from(reservation.block.len);
            }
            !ends
        });
    }

    /// Whether a bucket without a value belongs to a key: to `key` or another.
    fn owner(&self, bucket: u64, key: &[u8]) -> Owner {
        match self.pending.get(&bucket) {
            None => Owner::None,
            Some(pending) if pending.key == key => Owner::This,
            Some(_) => Owner::Another,
        }
    }

    /// Whether the key of a bucket has a value once all puts and deletes of it that have begun are installed. `None` if
    /// there are none.
    fn will_exist(&self, bucket: u64) -> Option<bool> {
        let pending = self.pending.get(&bucket)?;
        let newest = pending.operations.iter().max_by_key(|operation| operation.stamp)?;
        (newest.stamp > pending.installed).then_some(newest.value.is_some())
    }

    /// Notes a put or delete whose second part follows.
    fn note(&mut self, change: &Change<'_>) {
        let pending = self.pending.entry(change.bucket).or_insert_with(|| {
            let mut pending = self.spare.pop().unwrap_or_default();
            pending.key.extend_from_slice(change.key);
            pending
        });
        pending.operations.push(change.operation);
    }

    /// Forgets a put or delete that has ended. `is_installed` says whether its record was written.
    fn forget(&mut self, change: &Change<'_>, is_installed: bool) {
        let Some(pending) = self.pending.get_mut(&change.bucket) else { return };
        pending.operations.retain(|operation| operation.stamp != change.operation.stamp);
        if is_installed {
            pending.installed = pending.installed.max(change.operation.stamp);
        }
        if pending.operations.is_empty()
            && let Some(mut pending) = self.pending.remove(&change.bucket)
        {
            pending.key.clear();
            pending.installed = Stamp(0);
            self.spare.push(pending);
        }
    }
}

/// The key to which a bucket without a value belongs.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Owner {
    None,
    This,
    Another,
}

/// A piece of work in one partition.
struct At<'a, M: Memory> {
    table: &'a Table,
    index: u64,
    memory: &'a M,
    state: &'a mut Partition,
    now: Duration,
    scratch: &'a mut Vec<u8>,
}

/// What a piece of work has left in the answer, or the outcome that is the whole answer.
type Left = Result<(), Outcome>;

impl<M: Memory> At<'_, M> {
    /// Reads a part of the value of `key`. The answer's first number is the length of the whole value.
    fn get(
        &mut self,
        key: &[u8],
        offset: u32,
        stamp: Stamp,
        session: Option<u32>,
        answer: &mut Vec<u8>,
    ) -> Result<(), M::Wait> {
        // The hold does not end meanwhile: only a call of this partition ends it, or the end of the caller's session.
        if let Some(place) = self.state.held(self.table.key_field(key), stamp, session) {
            return self.get_part(key, offset, self.state.holds[place].used, answer);
        }
        let found = self.find(key)?;
        let Some(used) = found.used else {
            Answer::of(found.missing_outcome()).encode(answer);
            return Ok(());
        };
        if stamp != Stamp(0) && stamp != used.stamp {
            Answer::of(Outcome::Changed).encode(answer);
            return Ok(());
        }
        self.get_part(key, offset, used, answer)
    }

    /// Reads the first part of the value of `key`, and holds the value if it has further parts.
    fn hold(&mut self, key: &[u8], session: Option<u32>, answer: &mut Vec<u8>) -> Result<(), M::Wait> {
        let found = self.find(key)?;
        let Some(used) = found.used else {
            Answer::of(found.missing_outcome()).encode(answer);
            return Ok(());
        };
        self.get_part(key, 0, used, answer)?;
        if used.block.len as usize > LENGTH_SIZE + key_in_block(key).len() + PART_MAX {
            self.state.hold(used, session, self.table.spec().area);
        }
        Ok(())
    }

    fn end_hold(&mut self, key: &[u8], stamp: Stamp, session: Option<u32>) -> Outcome {
        match self.state.held(self.table.key_field(key), stamp, session) {
            Some(place) => {
                self.state.end_hold(place);
                Outcome::Done
            }
            None => Outcome::Absent,
        }
    }

    /// Reads a part of a value of `key`.
    fn get_part(&mut self, key: &[u8], offset: u32, used: Used, answer: &mut Vec<u8>) -> Result<(), M::Wait> {
        let before = LENGTH_SIZE + key_in_block(key).len();
        let value_len = used.block.len as usize - before;
        let offset = (offset as usize).min(value_len);
        let len = (value_len - offset).min(PART_MAX);
        self.scratch.clear();
        self.scratch.resize(len, 0);
        self.memory.read(used.block.at + (before + offset) as u64, self.scratch)?;
        let (stamp, first, value) = (used.stamp, value_len as u64, &self.scratch[..]);
        Answer { outcome: Outcome::Done, stamp, first, second: used.crc_value, value }.encode(answer);
        Ok(())
    }

    fn contains(&mut self, key: &[u8]) -> Result<Left, M::Wait> {
        let found = self.find(key)?;
        Ok(Err(if found.used.is_some() { Outcome::Done } else { found.missing_outcome() }))
    }

    /// The first part of a put in mode 1: writes the value to a new block.
    fn put(
        &mut self,
        key: &[u8],
        value: &[u8],
        records: &mut Records,
        answer: &mut Vec<u8>,
    ) -> Result<Left, M::Wait> {
        let (bucket, found) = match self.bucket_for(key)? {
            Ok(found) => found,
            Err(outcome) => return Ok(Err(outcome)),
        };
        let len = block_len(key.len(), value.len());
        let Some(block) = self.state.take(len, self.now) else { return Ok(Err(Outcome::OutOfMemory)) };
        let stamp = self.state.draw_stamp(self.now, found.used.is_none());
        let start = log::begin_put(self.scratch, stamp, key, bucket, self.place_of(block));
        put_block(self.scratch, key, value);
        let bytes = &self.scratch[start..];
        self.memory.write(block.at, bytes)?;
        let operation = Operation { stamp, value: Some((block, crc(bytes))) };
        self.append(self.change(bucket, key, operation, true), records, answer)
    }

    /// The first part of a delete.
    fn delete(&mut self, key: &[u8], records: &mut Records, answer: &mut Vec<u8>) -> Result<Left, M::Wait> {
        let found = self.find(key)?;
        let Some(bucket) = found.bucket else { return Ok(Err(found.missing_outcome())) };
        let existed = self.state.will_exist(bucket).unwrap_or(found.used.is_some());
        let stamp = self.state.draw_stamp(self.now, false);
        log::put_delete(self.scratch, stamp, key, bucket);
        self.append(self.change(bucket, key, Operation { stamp, value: None }, existed), records, answer)
    }

    /// The bucket that a put of `key` writes. A search ends at a bucket that never had a record. So those before the
    /// bucket, which other keys will have, are marked as deleted until then.
    fn bucket_for(&mut self, key: &[u8]) -> Result<Result<(u64, Found), Outcome>, M::Wait> {
        let found = self.find(key)?;
        for &bucket in &found.passed {
            let owner = self.table.key_field(&self.state.pending[&bucket].key);
            self.install(bucket, Record::deleted(owner, Stamp(0)))?;
        }
        Ok(found.bucket.or(found.vacant).map(|bucket| (bucket, found)).ok_or(Outcome::TableFull))
    }

    fn change<'k>(&self, bucket: u64, key: &'k [u8], operation: Operation, existed: bool) -> Change<'k> {
        Change { partition: self.index, bucket, key, operation, existed }
    }

    /// Ends the first part of a put or delete, whose record of the log is in the scratch buffer. Makes no access.
    fn append(
        &mut self,
        change: Change<'_>,
        records: &mut Records,
        answer: &mut Vec<u8>,
    ) -> Result<Left, M::Wait> {
        if mutants::INSTALLED_BEFORE_DURABLE.is_on() {
            self.install(change.bucket, record_of(self.table, &change))?;
        }
        records.append(self.scratch);
        change.encode(answer);
        self.state.note(&change);
        self.state.begun = BegunCall { token: self.state.begun.token, ..BegunCall::default() };
        Ok(Ok(()))
    }

    /// Reserves a block for a value that the client writes. The number has the session that chose it.
    fn reserve(
        &mut self,
        key: &[u8],
        number: (Option<u32>, u64),
        len: u32,
        crc: u64,
        answer: &mut Vec<u8>,
    ) -> Result<Left, M::Wait> {
        let (session, of_client) = number;
        let is_of_partition = of_client % (1 << PARTITION_BITS) == self.index;
        if !is_of_partition || self.state.reservations.contains_key(&number) {
            return Ok(Err(Outcome::NotReserved));
        }
        let others = self.state.reservations.range((session, 0)..=(session, u64::MAX)).count();
        if others >= RESERVATIONS_MAX && !mutants::RESERVATIONS_UNBOUNDED.is_on() {
            return Ok(Err(Outcome::TooManyReservations));
        }
        let len = block_len(key.len(), len as usize);
        let Some(block) = self.state.take(len, self.now) else { return Ok(Err(Outcome::OutOfMemory)) };
        if mutants::INSTALLED_BEFORE_COMMIT.is_on() {
            match self.bucket_for(key)? {
                Ok((bucket, found)) => {
                    let stamp = self.state.draw_stamp(self.now, found.used.is_none());
                    let operation = Operation { stamp, value: Some((block, crc)) };
                    self.install(bucket, record_of(self.table, &self.change(bucket, key, operation, true)))?;
                }
                Err(outcome) => return Ok(Err(outcome)),
            }
        }
        let reservation = Reservation { key: key.to_vec(), block, crc, since: self.now };
        self.state.begun.block = None;
        self.state.keep(number, reservation);
        Answer { second: block.at, ..Answer::of(Outcome::Done) }.encode(answer);
        Ok(Ok(()))
    }

    /// Writes bytes to a reserved block.
    fn write(
        &mut self,
        number: u64,
        offset: u32,
        bytes: &[u8],
        session: Option<u32>,
    ) -> Result<Left, M::Wait> {
        let reservation = self.state.reservations.get(&(session, number));
        let Some(&Reservation { block, .. }) = reservation else { return Ok(Err(Outcome::NotReserved)) };
        if u64::from(offset) + bytes.len() as u64 > block.len.into() {
            return Ok(Err(Outcome::NotWritten));
        }
        self.memory.write(block.at + u64::from(offset), bytes)?;
        Ok(Err(Outcome::Done))
    }

    /// The first part of a put in mode 2: checks what the client has written.
    fn commit(
        &mut self,
        number: u64,
        session: Option<u32>,
        records: &mut Records,
        answer: &mut Vec<u8>,
    ) -> Result<Left, M::Wait> {
        if self.state.begun.reservation.is_none() {
            let removed = self.state.remove((session, number));
            self.state.begun.reservation = removed.map(|reservation| ((session, number), reservation));
        }
        let Some((_, reservation)) = self.state.begun.reservation.clone() else {
            return Ok(Err(Outcome::NotReserved));
        };
        let Reservation { ref key, block, crc: promised, .. } = reservation;
        let (bucket, found) = match self.bucket_for(key)? {
            Ok(found) => found,
            Err(outcome) => return Ok(Err(outcome)),
        };
        let is_new = found.used.is_none();
        // The stamp is drawn last: a client that has not written its value costs none.
        let start = log::begin_put(self.scratch, Stamp(0), key, bucket, self.place_of(block));
        self.scratch.resize(start + block.len as usize, 0);
        self.memory.read(block.at, &mut self.scratch[start..])?;
        let bytes = &self.scratch[start..];
        if crc(bytes) != promised || super::layout::value_in(bytes, key).is_none() {
            return Ok(Err(Outcome::NotWritten));
        }
        let stamp = self.state.draw_stamp(self.now, is_new);
        log::set_stamp(self.scratch, stamp);
        let operation = Operation { stamp, value: Some((block, promised)) };
        self.append(self.change(bucket, key, operation, true), records, answer)
    }

    fn withdraw(&mut self, number: u64, session: Option<u32>) -> Outcome {
        match self.state.remove((session, number)) {
            Some(Reservation { block, .. }) => {
                self.state.release(block);
                Outcome::Done
            }
            None => Outcome::NotReserved,
        }
    }

    /// The second part of a put or delete: writes the record, unless one with a greater stamp was written meanwhile.
    fn finish(&mut self, change: Change<'_>) -> Result<(), M::Wait> {
        let installed = self.state.pending.get(&change.bucket).map_or(Stamp(0), |pending| pending.installed);
        let is_newest = installed < change.operation.stamp || mutants::OLDER_INSTALLED.is_on();
        if !is_newest {
            self.state.forget(&change, false);
            if let Some((block, _)) = change.operation.value {
                self.state.release(block);
            }
            return Ok(());
        }
        let before = self.record(change.bucket)?.decode();
        self.install(change.bucket, record_of(self.table, &change))?;
        self.state.forget(&change, true);
        let keeps = mutants::OVERWRITTEN_BLOCK_KEPT.is_on() && change.operation.value.is_some();
        if let Bucket::Used(used) = before
            && !keeps
        {
            self.state.release(used.block);
        }
        Ok(())
    }

    /// The place in the log of a block.
    fn place_of(&self, block: Block) -> u64 {
        (block.at - self.table.area(self.index).start) / BLOCK_ALIGN
    }

    /// The block at a place of the log. The place is outside the area if the log is of another store.
    fn block_at(&self, place: u64, len: usize) -> Block {
        Block { at: self.table.area(self.index).start + place * BLOCK_ALIGN, len: len as u32 }
    }

    /// Writes the epoch and counter of the last stamp to the partition's head.
    fn write_head(&self, last: Stamp) -> Result<(), M::Wait> {
        let head = [last.epoch(), last.counter()].map(U64::from);
        self.memory.write(self.table.head_at(self.index), head.as_bytes())
    }

    /// Searches for `key` along its path.
    fn find(&mut self, key: &[u8]) -> Result<Found, M::Wait> {
        let (home, field) = (self.table.home(key), self.table.key_field(key));
        let mut found = Found::default();
        for step in 0..self.table.probes() {
            let first = self.table.bucket_of(home, step);
            let (records, count) = self.block(first)?;
            for (bucket, record) in (first..).zip(&records[..count]) {
                let content = record.decode();
                match content {
                    Bucket::Used(used) => {
                        if used.key == field
                            && self.table.contains(self.index, used.block)
                            && (!field.is_long() || self.is_of(used.block, key)?)
                        {
                            (found.bucket, found.used) = (Some(bucket), Some(used));
                            return Ok(found);
                        }
                        continue;
                    }
                    Bucket::Torn | Bucket::Nonsense => found.is_damaged = true,
                    _ => {}
                }
                match self.state.owner(bucket, key) {
                    Owner::This => found.bucket = Some(bucket),
                    Owner::Another => {
                        if content == Bucket::Never {
                            found.passed.push(bucket);
                        }
                        continue;
                    }
                    Owner::None => {
                        found.vacant.get_or_insert(bucket);
                    }
                }
                if content == Bucket::Never {
                    return Ok(found);
                }
            }
        }
        Ok(found)
    }

    /// Whether a block has this long key.
    fn is_of(&mut self, block: Block, key: &[u8]) -> Result<bool, M::Wait> {
        self.scratch.clear();
        self.scratch.resize(key.len().min(block.len as usize - LENGTH_SIZE), 0);
        self.memory.read(block.at + LENGTH_SIZE as u64, self.scratch)?;
        Ok(self.scratch == key)
    }

    /// Writes a record in place, after noting it in the partition's head.
    fn install(&mut self, bucket: u64, record: Record) -> Result<(), M::Wait> {
        let redo_at = self.table.head_at(self.index) + REDO_OFFSET;
        self.memory.write(redo_at, Redo::new(bucket, record).as_bytes())?;
        let at = self.table.bucket_at(self.index, bucket);
        record.pieces().try_for_each(|(offset, piece)| self.memory.write(at + offset, piece))
    }

    /// Reads the block of buckets that begins with `first`. Returns the records and their number.
    fn block(&self, first: u64) -> Result<([Record; BLOCK_BUCKETS_MAX as usize], usize), M::Wait> {
        let mut records = [Record::new_zeroed(); BLOCK_BUCKETS_MAX as usize];
        let count = self.table.spec().block_buckets as usize;
        self.memory.read(self.table.bucket_at(self.index, first), records[..count].as_mut_bytes())?;
        Ok((records, count))
    }

    fn record(&self, bucket: u64) -> Result<Record, M::Wait> {
        let mut record = Record::new_zeroed();
        self.memory.read(self.table.bucket_at(self.index, bucket), record.as_mut_bytes())?;
        Ok(record)
    }
}

fn of_pool(block: Block) -> pool::Block {
    pool::Block { at: block.at, len: block.len.into() }
}

/// Returns the record that a put or delete writes.
fn record_of(table: &Table, change: &Change<'_>) -> Record {
    let (key, stamp) = (table.key_field(change.key), change.operation.stamp);
    match change.operation.value {
        Some((block, crc_value)) => Record::used(Used { key, block, crc_value, stamp }),
        None if mutants::DELETED_BUCKET_CLEARED.is_on() => Record::new_zeroed(),
        None => Record::deleted(key, stamp),
    }
}

impl Found {
    /// Returns the outcome for a key that has no value.
    fn missing_outcome(&self) -> Outcome {
        if self.is_damaged { Outcome::Damaged } else { Outcome::Absent }
    }
}

/// Number of bytes of an encoded [`Change`] before its key.
const CHANGE_SIZE: usize = 6 * size_of::<u64>();

impl<'a> Change<'a> {
    fn encode(&self, bytes: &mut Vec<u8>) {
        let (block, crc) = self.operation.value.unwrap_or((Block { at: 0, len: 0 }, 0));
        let flags = u64::from(self.existed) | u64::from(self.operation.value.is_some()) << 1;
        let len_and_flags = u64::from(block.len) | flags << 32;
        let numbers = [self.partition, self.bucket, self.operation.stamp.0, block.at, len_and_flags, crc];
        numbers.iter().for_each(|number| bytes.extend_from_slice(&number.to_le_bytes()));
        bytes.extend_from_slice(self.key);
    }

    /// Decodes what the first part of a call has left in this process.
    fn decode(bytes: &'a [u8]) -> Change<'a> {
        let (numbers, key) = bytes.split_at(CHANGE_SIZE);
        let number =
            |place: usize| u64::from_le_bytes(numbers[place * 8..][..8].try_into().expect("eight bytes"));
        let (partition, bucket, stamp, at, len_and_flags, crc) =
            (number(0), number(1), Stamp(number(2)), number(3), number(4), number(5));
        let block = Block { at, len: len_and_flags as u32 };
        let value = (len_and_flags >> 33 & 1 == 1).then_some((block, crc));
        let existed = len_and_flags >> 32 & 1 == 1;
        Change { partition, bucket, key, operation: Operation { stamp, value }, existed }
    }
}
