//! Work of the memory node's CPU for a FaSST store: the handlers of its requests.
//!
//! Handlers of different buckets and of different clients run at the same time. A handler that reads or changes a
//! bucket has one of the store's locks for it, and one that changes a client's state has one for the client.
//!
//! Differs from the paper (5): a reader has the bucket's lock among the node's threads, in place of a read of the
//! timestamp before and after. A write locks all keys of a bucket at once, so that a lock needs no count of keys.
//!
//! A handler may end in the middle, with its node, and its caller repeats it at the next node. So a lock is noted in
//! its lane's list before it is taken, and a put marks its slot before it writes the value.
//!
//! Invariant: packets are handled only if they have the admitted epoch of their client. So nothing that a client has
//! sent runs once another one has raised its epoch.
//! Invariant: packets of a promoter, but for fills, are handled only if it is the last one that has asked for it. While
//! a member gives clients its key, no promoter has it.
//! Invariant: a lock is taken only for the last transaction of a lane, and only if that one has not ended.
//! Invariant: a bucket is changed only for the transaction that has its lock, and a copy only by a newer stamp.

use super::layout::{
    ANY_VERSION, BucketHead, ENDED_OFFSET, EPOCHS_SIZE, EntryId, KIND_OFFSET, LockHeader, NEXT_OFFSET, Place,
    RECORD_SIZE, RecordHeader, SLOTS, SlotHead, SlotKind, Spec, Table, TxnId, VALUE_MAX, WRITE_SIZE,
    WRITES_MAX, Word, Write, buckets_for,
};
use super::request::{
    ABORT, BACKUP, CLOSE, COMMIT, FENCE, FILL, GET, GRANT, LOCK, LOCK_GET, LOG, LOOK, LaneState, NO_PLACE,
    PROMOTE, PROMOTION, RAISE, RECORD, Status, VALIDATE, keys, places, put_words, words,
};
use super::{KIND, mutants};
use crate::hash_slots::Placement;
use crate::lease::ClientId;
use crate::rpc::fasst::{Handled, Handler, Handlers, Header};
use farside_remote::service::{Call, Context, Extent, Kind, Locks, Plan, Service, Work};
use farside_remote::{Memory, Rights, Width};
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Node-side half of FaSST.
pub struct FasstKind;

/// Number of client ids, unless the store's creator gives another.
const IDS: u16 = 64;
/// Number of transactions of a client that commit, or have locks, at the same time, unless the store's creator gives
/// another.
const LANES: u16 = 16;
/// Length of the longest value in bytes, unless the store's creator gives another.
const VALUE_LEN: u32 = 1024;
/// Length of the longest key of a value of that length, unless the store's creator gives another.
const KEY_LEN: u32 = 64;
/// Number of the longest pairs that a transaction can write, unless the store's creator gives another limit.
const WRITES: u32 = 8;
/// Length of a lease, unless the store's creator gives another.
const LEASE: Duration = Duration::from_millis(500);

/// Parameters in a request to create a store.
#[derive(Clone, Copy, Debug, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub(super) struct NewStore {
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) items: Option<u64>,
    pub(super) placement: Placement,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) ids: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lanes: Option<u16>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) lease_us: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) key_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) value_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) writes_max: Option<u32>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) backups: Option<u8>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) seed: Option<u64>,
}

impl NewStore {
    /// Returns the parameters of a store. Without a number of items, the store fills the quota.
    ///
    /// # Errors
    /// No store has these parameters.
    pub(super) fn spec(&self, quota: u64, seed: u64) -> Result<Spec, String> {
        let value_max = self.value_max.unwrap_or(VALUE_LEN);
        let pair_max = value_max.saturating_add(self.key_max.unwrap_or(KEY_LEN).max(1));
        let write = pair_max.saturating_add(WRITE_SIZE as u32);
        let chosen = || write.max(write.saturating_mul(WRITES).min(WRITES_MAX));
        let spec = Spec {
            buckets: 1,
            extras: 0,
            seed,
            placement: self.placement,
            ids: self.ids.unwrap_or(IDS),
            lanes: self.lanes.unwrap_or(LANES),
            lease_us: self.lease_us.unwrap_or(LEASE.as_micros() as u64),
            value_max,
            pair_max,
            writes_max: self.writes_max.unwrap_or_else(chosen),
            backups: self.backups.unwrap_or(0),
        };
        let sized = |items: u64| {
            let (buckets, extras) = buckets_for(items)
                .ok_or_else(|| format!("{items} items are too many for one store: give fewer --items"))?;
            Ok::<Spec, String>(Spec { buckets, extras, ..spec })
        };
        let mut sized_spec = sized(self.items.unwrap_or(1).max(1))?;
        sized_spec.check()?;
        if self.items.is_none() {
            // Buckets are counted in powers of two.
            let mut items = SLOTS as u64;
            let fits = |spec: &Spec| spec.table_len().is_some_and(|len| len <= quota);
            while let Ok(larger) = sized(items.saturating_mul(2))
                && fits(&larger)
            {
                (items, sized_spec) = (items.saturating_mul(2), larger);
            }
            sized_spec.check()?;
        }
        Ok(sized_spec)
    }
}

impl<M: Memory> Kind<M> for FasstKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        let spec = match serde_json::from_str::<Spec>(parameters) {
            // A member that takes the place of another one.
            Ok(spec) => {
                spec.check()?;
                spec
            }
            Err(_) => {
                let request: NewStore = serde_json::from_str(parameters).map_err(|error| {
                    let example =
                        NewStore { items: Some(1000), value_max: Some(VALUE_MAX), ..NewStore::default() };
                    let example = serde_json::to_string(&example).expect("plain data");
                    format!("a {KIND} store takes parameters such as {example}: {error}")
                })?;
                request.spec(quota, request.seed.unwrap_or(entropy))?
            }
        };
        let parameters = serde_json::to_string(&spec).expect("plain data");
        Ok(Plan {
            table_len: spec.table_len().expect("the parameters were checked"),
            parameters,
            wide: false,
        })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(FasstService { table: Table::new(parameters, table)? }))
    }
}

struct FasstService {
    table: Table,
}

/// Number of the locks that exclude requests of one client. The others exclude requests for one bucket.
const CLIENT_LOCKS: u64 = 16;
const BUCKET_LOCKS: u64 = Locks::COUNT as u64 - CLIENT_LOCKS;

impl<M: Memory> Service<M> for FasstService {
    fn call(
        &self,
        context: Context<'_, M>,
        call: Call<'_>,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        let handlers = handlers::<M>();
        let (needed, word) = match handlers.changes(call.request) {
            true => (Rights::WRITE, "write"),
            false => (Rights::READ, "read"),
        };
        if !call.rights.contains(needed) {
            return Ok(Err(format!(
                "this operation on a {KIND} store needs the right '{word}', which your token lacks: ask the operator \
                 of the node"
            )));
        }
        handlers.serve(&self.table, context.memory, call.request, answer)
    }

    fn locks(&self, work: Work<'_>) -> Locks {
        match work {
            Work::Call(packet) => handlers::<M>().locks(&self.table, packet),
            _ => Locks::NONE,
        }
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // All of the store lies in its table.
    }
}

const fn handlers<M: Memory>() -> Handlers<Table, M> {
    Handlers { of: handler::<M>, admits: admits::<M> }
}

/// Whether the packet has the epoch that is admitted for its client, or for promoters. Requests that grant or raise
/// epochs need none, nor do fills, and those that look at lanes may have none.
fn admits<M: Memory>(table: &Table, memory: &M, header: &Header, kinds: &[u8]) -> Result<bool, M::Wait> {
    let are_all = |of: &[u8]| kinds.iter().all(|kind| of.contains(kind));
    if header.epoch >= PROMOTION {
        // A promoter fills once it has settled all transactions. Then no other one finds any.
        let is_free = are_all(&[PROMOTE, FILL]) || mutants::PROMOTERS_UNFENCED.is_on();
        return Ok(is_free || memory.load(table.promoter().raw(), Width::W8)? as u64 == header.epoch);
    }
    if are_all(&[GRANT, FENCE, RAISE])
        || (are_all(&[LOOK]) && (header.epoch == 0 || mutants::OLD_EPOCH_LOOKS.is_on()))
        || (kinds == [RECORD] && mutants::OLD_EPOCH_GETS_RECORD.is_on())
        || mutants::OLD_EPOCH_ACCEPTED.is_on()
    {
        return Ok(true);
    }
    let admitted = ClientId::new(header.coordinator).and_then(|client| table.admitted(client));
    let Some(at) = admitted else { return Ok(true) }; // The handlers refuse unknown clients.
    Ok(memory.load(at.raw(), Width::W8)? as u64 == header.epoch)
}

fn of_client(_: &Table, header: &Header, _: &[u8]) -> Locks {
    client_lock(header)
}

fn client_lock(header: &Header) -> Locks {
    Locks::of(u64::from(header.coordinator) % CLIENT_LOCKS)
}

fn bucket_lock(part: u64, bucket: u64) -> Locks {
    let mixed = (bucket ^ part << 60).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 32;
    Locks::of(CLIENT_LOCKS + mixed % BUCKET_LOCKS)
}

/// No packet of an earlier promoter is being handled.
fn alone(_: &Table, _: &Header, _: &[u8]) -> Locks {
    Locks::ALL
}

/// Of a get and of a validation.
fn of_read(_: &Table, _: &Header, payload: &[u8]) -> Locks {
    words(payload).map_or(Locks::NONE, |([_, bucket], _)| bucket_lock(0, bucket))
}

fn of_lock(_: &Table, header: &Header, payload: &[u8]) -> Locks {
    words(payload).map_or(Locks::NONE, |([_, bucket], _)| bucket_lock(0, bucket)).and(client_lock(header))
}

fn of_commit(_: &Table, header: &Header, payload: &[u8]) -> Locks {
    words(payload).map_or(Locks::NONE, |([_, _, bucket], _)| bucket_lock(0, bucket)).and(client_lock(header))
}

fn of_fill(_: &Table, _: &Header, payload: &[u8]) -> Locks {
    words(payload).map_or(Locks::NONE, |([_, bucket, part], _)| bucket_lock(part, bucket))
}

fn of_backup(_: &Table, header: &Header, payload: &[u8]) -> Locks {
    let lock = words(payload).map_or(Locks::NONE, |([_, _, bucket, part], _)| bucket_lock(part, bucket));
    lock.and(client_lock(header))
}

const MALFORMED: &str = "the request is malformed: use the same release on both sides";
const NO_LANE: &str =
    "the request names a client or a lane that the store does not have: open the store again";
const NO_BUCKET: &str =
    "the request names a bucket or writes that this store does not have: open the store again";
const DAMAGED: &str = "the table is damaged: someone who holds the store's key has overwritten it";

/// A handler's access to the store.
struct At<'c, M> {
    table: &'c Table,
    memory: &'c M,
}

/// Returns a refusal from a handler unless there is a value.
macro_rules! some {
    ($option:expr, $reason:expr) => {
        match $option {
            Some(value) => value,
            None => return Ok(Err($reason.to_owned())),
        }
    };
}

fn done(status: Status) -> u8 {
    status as u8
}

/// Returns the handler of a type of requests.
fn handler<M: Memory>(kind: u8) -> Option<Handler<Table, M>> {
    Some(match kind {
        GET => Handler { changes: false, locks: of_read, run: get },
        LOCK => Handler { changes: true, locks: of_lock, run: lock },
        LOCK_GET => Handler { changes: true, locks: of_lock, run: lock_and_get },
        VALIDATE => Handler { changes: false, locks: of_read, run: validate },
        LOG => Handler { changes: true, locks: of_client, run: log },
        BACKUP => Handler { changes: true, locks: of_backup, run: backup },
        COMMIT => Handler { changes: true, locks: of_commit, run: commit },
        ABORT => Handler { changes: true, locks: of_client, run: abort },
        CLOSE => Handler { changes: true, locks: of_client, run: close },
        GRANT => Handler { changes: true, locks: of_client, run: grant },
        FENCE => Handler { changes: true, locks: of_client, run: fence },
        RAISE => Handler { changes: true, locks: of_client, run: raise },
        PROMOTE => Handler { changes: true, locks: alone, run: promote },
        LOOK => Handler { changes: false, locks: of_client, run: look },
        RECORD => Handler { changes: false, locks: of_client, run: record },
        FILL => Handler { changes: true, locks: of_fill, run: fill },
        _ => return None,
    })
}

/// Reads a key of a bucket that no other transaction has locked.
fn get<M: Memory>(
    table: &Table,
    memory: &M,
    _: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([txn, bucket], key) = some!(words(payload), MALFORMED);
    if bucket != table.bucket_of(key) {
        return Ok(Err(NO_BUCKET.into()));
    }
    let head = at.lock_header(bucket)?;
    if head.is_locked() && !head.is_locked_by(TxnId::of_bits(txn)) {
        put_words(out, &[head.owner.bits()]);
        return Ok(Ok(done(Status::Locked)));
    }
    let found = some!(at.find(bucket, key)?, DAMAGED);
    let stamp = found.slot.map_or(0, |(_, slot)| slot.stamp.get());
    put_words(out, &[head.version(), stamp]);
    Ok(Ok(done(at.read_value(found.slot, key, out)?)))
}

/// Locks the bucket of keys that a transaction writes, and finds their places.
fn lock<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let rooms = match at.lock(header, payload, true, out)? {
        Ok(Lock { rooms, .. }) => rooms,
        Err(Declined::By(status)) => return Ok(Ok(done(status))),
        Err(Declined::For(reason)) => return Ok(Err(reason.into())),
    };
    put_words(out, &[rooms.iter().map(Room::stamp).max().unwrap_or(0)]);
    rooms.iter().filter_map(Room::place).for_each(|place| put_words(out, &[place.bits()]));
    Ok(Ok(done(Status::Done)))
}

/// Locks the bucket of keys that a transaction may write, and reads the last key. Finds places only in the buckets that
/// the chain has.
fn lock_and_get<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let (version, key, rooms) = match at.lock(header, payload, false, out)? {
        Ok(Lock { version, last, rooms }) => (version, last, rooms),
        Err(Declined::By(status)) => return Ok(Ok(done(status))),
        Err(Declined::For(reason)) => return Ok(Err(reason.into())),
    };
    let room = some!(rooms.last(), MALFORMED);
    put_words(out, &[version, room.stamp(), room.place().map_or(NO_PLACE, Place::bits)]);
    Ok(Ok(done(at.read_value(room.slot(), key, out)?)))
}

/// Checks that a bucket has a version, and no lock of another transaction.
fn validate<M: Memory>(
    table: &Table,
    memory: &M,
    _: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([txn, bucket, version], _) = some!(words(payload), MALFORMED);
    if bucket >= table.spec().buckets {
        return Ok(Err(NO_BUCKET.into()));
    }
    let head = at.lock_header(bucket)?;
    let is_locked = head.is_locked() && head.owner != TxnId::of_bits(txn);
    if is_locked && !mutants::LOCK_IGNORED.is_on() {
        put_words(out, &[head.owner.bits()]);
        return Ok(Ok(done(Status::Locked)));
    }
    Ok(Ok(done(if head.version() == version { Status::Done } else { Status::Changed })))
}

/// Stores the record of a transaction.
fn log<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let (record, writes) = some!(RecordHeader::ref_from_prefix(payload).ok(), MALFORMED);
    let number = some!(at.lane_of(record.txn, header), NO_LANE);
    let is_sound = record.len() == writes.len()
        && record.is_sound(writes)
        && writes.len() <= table.spec().writes_max as usize
        && Write::decode_all(writes, table.spec()).is_some();
    if !is_sound {
        return Ok(Err(NO_BUCKET.into()));
    }
    let known = at.record(number, &mut Vec::new())?;
    if record.txn <= at.word(number)?.closed || known > record.txn {
        return Ok(Ok(done(Status::Ended)));
    }
    if known < record.txn {
        memory.write(table.record(number).raw(), payload)?;
    }
    Ok(Ok(done(Status::Done)))
}

/// Installs values of a committed transaction in the copies of a bucket.
fn backup<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([txn, stamp, bucket, part], rest) = some!(words(payload), MALFORMED);
    some!(at.lane_of(TxnId::of_bits(txn), header), NO_LANE);
    let part = u8::try_from(part).ok().filter(|part| (1..=table.spec().backups).contains(part));
    let (part, writes) = (some!(part, NO_BUCKET), some!(at.writes_of(bucket, rest), NO_BUCKET));
    for write in writes {
        at.put_newer(part, &write, stamp)?;
    }
    Ok(Ok(done(Status::Done)))
}

/// Installs a value that another member has, unless this one has a newer one.
fn fill<M: Memory>(
    table: &Table,
    memory: &M,
    _: &Header,
    payload: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([stamp, bucket, part], rest) = some!(words(payload), MALFORMED);
    let part = some!(u8::try_from(part).ok().filter(|part| *part <= table.spec().backups), NO_BUCKET);
    for write in some!(at.writes_of(bucket, rest), NO_BUCKET) {
        // Copies have no chains.
        if part == 0 && !mutants::EXTRA_UNCHAINED.is_on() {
            let is_own = table.bucket_of(write.key) == bucket && at.chain(bucket, write.place.bucket)?;
            some!(is_own.then_some(()), NO_BUCKET);
        }
        at.put_newer(part, &write, stamp)?;
    }
    Ok(Ok(done(Status::Done)))
}

/// Installs values of a committed transaction in a bucket that it has locked, if any, and frees the bucket with its
/// next version.
fn commit<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([txn, stamp, bucket, is_last], rest) = some!(words(payload), MALFORMED);
    let txn = TxnId::of_bits(txn);
    let number = some!(at.lane_of(txn, header), NO_LANE);
    let writes = some!(at.writes_of(bucket, rest), NO_BUCKET);
    let head = at.lock_header(bucket)?;
    if head.is_locked_by(txn) || mutants::PUT_REPLAYED.is_on() {
        for write in &writes {
            at.put(0, write, stamp)?;
        }
        // A bucket that was locked and not written keeps its version.
        let raised = u64::from(!writes.is_empty());
        at.set_lock(bucket, LockHeader::free(head.version() + raised))?;
    }
    if is_last == 1 {
        let word = at.word(number)?;
        at.end(number, Word { ended: word.ended.max(txn), ..word })?;
    }
    Ok(Ok(done(Status::Done)))
}

/// Frees all buckets that a transaction has locked, and locks none for it from now on.
fn abort<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([txn], _) = some!(words(payload), MALFORMED);
    let txn = TxnId::of_bits(txn);
    let number = some!(at.lane_of(txn, header), NO_LANE);
    let word = at.word(number)?;
    if word.holder == txn {
        for bucket in at.held(number, &word)? {
            let bucket = some!(Some(bucket.get()).filter(|bucket| *bucket < table.spec().buckets), DAMAGED);
            let head = at.lock_header(bucket)?;
            // While it is locked by this transaction, only requests of this client change it.
            if head.is_locked_by(txn) {
                let raised = u64::from(mutants::ABORT_RAISES_VERSION.is_on());
                at.set_lock(bucket, LockHeader::free(head.version() + raised))?;
            }
        }
    }
    at.end(number, Word { ended: word.ended.max(txn), ..word })?;
    Ok(Ok(done(Status::Done)))
}

/// Notes that the records of a lane up to that of a transaction are not needed any more.
fn close<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let ([txn], _) = some!(words(payload), MALFORMED);
    let txn = TxnId::of_bits(txn);
    let number = some!(at.lane_of(txn, header), NO_LANE);
    let word = at.word(number)?;
    at.end(number, Word { closed: word.closed.max(txn), ..word })?;
    Ok(Ok(done(Status::Done)))
}

/// Grants a client an epoch that no other request gets, unless it has lost its id or was fenced. So a client that is
/// slow to join does not begin after its recoverer, which finds nothing to settle, has freed the id.
fn grant<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let client = some!(ClientId::new(header.coordinator), NO_LANE);
    let (holder, fenced) = (some!(table.holder(client), NO_LANE), some!(table.fenced(client), NO_LANE));
    let ([nonce], _) = some!(words(payload), MALFORMED);
    let has_lost = memory.load(holder.raw(), Width::W8)? as u64 != nonce
        || memory.load(fenced.raw(), Width::W8)? as u64 == nonce;
    if has_lost && !mutants::FENCED_JOINS.is_on() {
        return Ok(Ok(done(Status::Ended)));
    }
    next_epoch(table, memory, client, out)
}

/// Grants a recoverer an epoch of a client that no other request gets, and the client none any more, unless the client
/// has lost its id.
fn fence<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let client = some!(ClientId::new(header.coordinator), NO_LANE);
    let (holder, fenced) = (some!(table.holder(client), NO_LANE), some!(table.fenced(client), NO_LANE));
    let ([nonce], _) = some!(words(payload), MALFORMED);
    let is_recovered = memory.load(holder.raw(), Width::W8)? as u64 != nonce;
    if is_recovered && !mutants::LEASE_UNCONFIRMED.is_on() {
        return Ok(Ok(done(Status::Ended)));
    }
    memory.write(fenced.raw(), &nonce.to_le_bytes())?;
    next_epoch(table, memory, client, out)
}

fn next_epoch<M: Memory>(table: &Table, memory: &M, client: ClientId, out: &mut Vec<u8>) -> Handled<M::Wait> {
    let at = some!(table.granted(client), NO_LANE).raw();
    let next = (memory.load(at, Width::W8)? as u64).saturating_add(1);
    memory.write(at, &next.to_le_bytes())?;
    put_words(out, &[next]);
    Ok(Ok(done(Status::Done)))
}

/// Admits only packets with the epoch of this one from now on, unless a later epoch is admitted already.
fn raise<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    _: &[u8],
    _: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let client = some!(ClientId::new(header.coordinator), NO_LANE);
    let (granted, at) =
        (some!(table.granted(client), NO_LANE).raw(), some!(table.admitted(client), NO_LANE).raw());
    if header.epoch >= PROMOTION {
        // No packet of a former configuration is handled any more.
        memory.write(granted, &[0; EPOCHS_SIZE as usize])?;
        return Ok(Ok(done(Status::Done)));
    }
    let admitted = memory.load(at, Width::W8)? as u64;
    if admitted > header.epoch {
        return Ok(Ok(done(Status::Ended)));
    }
    memory.write(at, &header.epoch.to_le_bytes())?;
    Ok(Ok(done(Status::Done)))
}

/// Admits only packets of this promoter from now on, and fills, unless a later one has asked for it.
fn promote<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    _: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    if header.epoch <= PROMOTION {
        return Ok(Err(MALFORMED.into()));
    }
    let at = table.promoter().raw();
    let last = memory.load(at, Width::W8)? as u64;
    if last >= header.epoch {
        put_words(out, &[last]);
        return Ok(Ok(done(Status::Ended)));
    }
    memory.write(at, &header.epoch.to_le_bytes())?;
    Ok(Ok(done(Status::Done)))
}

/// Returns the state of a lane.
fn look<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let number = some!(at.lane(payload, header), NO_LANE);
    let (word, record) = (at.word(number)?, at.record(number, &mut Vec::new())?);
    let record = if record > word.closed { record } else { TxnId::NONE };
    LaneState { word, record }.encode(out);
    Ok(Ok(done(Status::Done)))
}

/// Returns the record of a lane.
fn record<M: Memory>(
    table: &Table,
    memory: &M,
    header: &Header,
    payload: &[u8],
    out: &mut Vec<u8>,
) -> Handled<M::Wait> {
    let at = At { table, memory };
    let number = some!(at.lane(payload, header), NO_LANE);
    let mut record = Vec::new();
    if at.record(number, &mut record)? == TxnId::NONE {
        return Ok(Ok(done(Status::Absent)));
    }
    out.extend_from_slice(&record);
    Ok(Ok(done(Status::Done)))
}

/// Result of the search for a key in a chain of buckets.
struct Found {
    /// The key's slot.
    slot: Option<(Place, SlotHead)>,
    /// The free slots of the chain.
    free: Vec<Place>,
    /// The last bucket of the chain.
    last: u64,
}

impl Found {
    /// The place of the key, or one that is free and not `taken`.
    fn room(self, taken: &BTreeSet<Place>) -> Room {
        match self.slot {
            Some((place, slot)) => Room::Slot(place, slot),
            None => self.free.into_iter().find(|place| !taken.contains(place)).map_or(Room::None, Room::Free),
        }
    }
}

/// Room for a key.
enum Room {
    /// The key has this slot.
    Slot(Place, SlotHead),
    /// The key has none, and this one is free.
    Free(Place),
    None,
}

impl Room {
    fn slot(&self) -> Option<(Place, SlotHead)> {
        match self {
            Room::Slot(place, slot) => Some((*place, *slot)),
            Room::Free(_) | Room::None => None,
        }
    }

    fn place(&self) -> Option<Place> {
        match self {
            Room::Slot(place, _) | Room::Free(place) => Some(*place),
            Room::None => None,
        }
    }

    fn stamp(&self) -> u64 {
        self.slot().map_or(0, |(_, slot)| slot.stamp.get())
    }
}

/// A bucket that a request has locked, or had locked before.
struct Lock<'p> {
    version: u64,
    /// The last key of the request.
    last: &'p [u8],
    /// For each key.
    rooms: Vec<Room>,
}

/// Reason why a request does not lock a bucket.
enum Declined {
    /// The response says so.
    By(Status),
    /// The request is refused.
    For(&'static str),
}

impl<M: Memory> At<'_, M> {
    /// Number of the lane of a transaction of the packet's client; `None` if the store does not have it.
    fn lane_of(&self, txn: TxnId, header: &Header) -> Option<u64> {
        let entry = txn.entry().filter(|entry| entry.client.number() == header.coordinator)?;
        self.table.number(entry)
    }

    /// Number of a lane of the packet's client that a payload names; `None` if the store does not have it.
    fn lane(&self, payload: &[u8], header: &Header) -> Option<u64> {
        let ([lane], _) = words(payload)?;
        let lane = u16::try_from(lane).ok()?;
        self.table.number(EntryId { client: ClientId::new(header.coordinator)?, lane })
    }

    /// Decodes writes of keys of one bucket; `None` if the store does not have them.
    fn writes_of<'b>(&self, bucket: u64, bytes: &'b [u8]) -> Option<Vec<Write<'b>>> {
        let writes = Write::decode_all(bytes, self.table.spec())?;
        let are_own = bucket < self.table.spec().buckets && writes.iter().all(|write| write.bucket == bucket);
        are_own.then_some(writes)
    }

    /// Locks a bucket for the transaction of a lock request, unless it has the lock, and finds the places of the
    /// request's keys. If a place is `due` to each key, adds extra buckets to the bucket's chain. If another
    /// transaction has the lock, appends that one to `out`.
    fn lock<'p>(
        &self,
        header: &Header,
        payload: &'p [u8],
        due: bool,
        out: &mut Vec<u8>,
    ) -> Result<Result<Lock<'p>, Declined>, M::Wait> {
        let Some(([txn, bucket, expected], rest)) = words(payload) else {
            return Ok(Err(Declined::For(MALFORMED)));
        };
        let Some((taken, keys)) = places(rest).and_then(|(taken, rest)| Some((taken, keys(rest)?))) else {
            return Ok(Err(Declined::For(MALFORMED)));
        };
        let (txn, table) = (TxnId::of_bits(txn), self.table);
        let Some(number) = self.lane_of(txn, header) else { return Ok(Err(Declined::For(NO_LANE))) };
        let are_own = keys
            .iter()
            .all(|key| key.len() <= table.spec().pair_max as usize && table.bucket_of(key) == bucket);
        let are_too_many = (taken.len() + keys.len()) as u64 > table.spec().held_max();
        // Each key would get a place of its own.
        let are_repeated = keys.len() > 1 && BTreeSet::from_iter(&keys).len() < keys.len();
        if !are_own || are_too_many || are_repeated {
            return Ok(Err(Declined::For(NO_BUCKET)));
        }
        let mut word = self.word(number)?;
        let is_late = txn <= word.ended && !mutants::LATE_LOCK_GRANTED.is_on();
        if is_late || txn < word.holder || (txn > word.holder && word.has_locks()) {
            return Ok(Err(Declined::By(Status::Ended)));
        }
        let head = self.lock_header(bucket)?;
        if head.is_locked() && !head.is_locked_by(txn) {
            put_words(out, &[head.owner.bits()]);
            return Ok(Err(Declined::By(Status::Locked)));
        }
        if ![ANY_VERSION, head.version()].contains(&expected) {
            return Ok(Err(Declined::By(Status::Changed)));
        }
        if mutants::LOCK_LEFT.is_on() && !self.take(number, &mut word, txn, (bucket, head))? {
            return Ok(Err(Declined::For(NO_BUCKET)));
        }
        let (mut rooms, last) = (Vec::with_capacity(keys.len()), *keys.last().expect("a request has a key"));
        let mut taken = BTreeSet::from_iter(taken);
        for key in keys {
            let room = match due || mutants::READ_CHAINS.is_on() {
                true => self.find_or_reserve(bucket, key, &taken)?,
                false => self.find(bucket, key)?.map(|found| found.room(&taken)),
            };
            let Some(room) = room else { return Ok(Err(Declined::For(DAMAGED))) };
            if due && matches!(room, Room::None) {
                return Ok(Err(Declined::By(Status::Full)));
            }
            taken.extend(room.place());
            rooms.push(room);
        }
        if !self.take(number, &mut word, txn, (bucket, head))? {
            return Ok(Err(Declined::For(NO_BUCKET)));
        }
        Ok(Ok(Lock { version: head.version(), last, rooms }))
    }

    /// Notes a bucket in the list of a lane, and locks it. Returns false if the list is full.
    fn take(
        &self,
        number: u64,
        word: &mut Word,
        txn: TxnId,
        (bucket, head): (u64, LockHeader),
    ) -> Result<bool, M::Wait> {
        if txn > word.holder {
            (word.holder, word.held) = (txn, U64::ZERO);
        }
        if !self.held(number, word)?.contains(&U64::new(bucket)) {
            let count = word.held.get();
            if count >= self.table.spec().held_max() {
                return Ok(false);
            }
            self.memory.write(self.table.held(number).raw() + 8 * count, &bucket.to_le_bytes())?;
            word.held = U64::new(count + 1);
            self.memory.write(self.table.word(number).raw(), &word.as_bytes()[..ENDED_OFFSET as usize])?;
        }
        self.set_lock(bucket, LockHeader::locked(head.version(), txn))?;
        Ok(true)
    }

    /// Appends the value of a key, if its slot has one.
    fn read_value(
        &self,
        slot: Option<(Place, SlotHead)>,
        key: &[u8],
        out: &mut Vec<u8>,
    ) -> Result<Status, M::Wait> {
        let Some((place, slot)) = slot.filter(|(_, slot)| slot.kind() == SlotKind::Value) else {
            return Ok(Status::Absent);
        };
        let (value_at, len) = (out.len(), slot.value_len.get() as usize);
        out.resize(value_at + len, 0);
        self.memory.read(self.table.pair(0, place).raw() + key.len() as u64, &mut out[value_at..])?;
        Ok(Status::Done)
    }

    /// Searches the chain of a bucket for a key. Returns `None` if the chain is not one.
    fn find(&self, bucket: u64, key: &[u8]) -> Result<Option<Found>, M::Wait> {
        let (hash, mut found) = (self.table.hash(key), Found { slot: None, free: Vec::new(), last: bucket });
        let mut stored = Vec::new();
        for _ in 0..=self.table.spec().extras {
            let mut head = BucketHead::new_zeroed();
            self.memory.read(self.table.bucket(0, found.last).raw(), head.as_mut_bytes())?;
            for (slot, of) in head.slots.iter().enumerate() {
                let place = Place { bucket: found.last, slot };
                if of.kind() == SlotKind::Free {
                    found.free.push(place);
                } else if of.hash.get() == hash && usize::from(of.key_len.get()) == key.len() {
                    let is_pair =
                        key.len() + of.value_len.get() as usize <= self.table.spec().pair_max as usize;
                    stored.resize(key.len(), 0);
                    self.memory.read(self.table.pair(0, place).raw(), &mut stored)?;
                    if stored == key && is_pair {
                        found.slot = Some((place, *of));
                        return Ok(Some(found));
                    }
                }
            }
            match head.next.get().checked_sub(1) {
                None => return Ok(Some(found)),
                Some(next) if next < self.table.spec().all_buckets() => found.last = next,
                Some(_) => return Ok(None),
            }
        }
        Ok(None)
    }

    /// Finds the place of a key, or one that is free and not `taken`. Adds an extra bucket to the chain if there is
    /// none.
    fn find_or_reserve(
        &self,
        bucket: u64,
        key: &[u8],
        taken: &BTreeSet<Place>,
    ) -> Result<Option<Room>, M::Wait> {
        let Some(found) = self.find(bucket, key)? else { return Ok(None) };
        let last = found.last;
        match found.room(taken) {
            Room::None => {}
            room => return Ok(Some(room)),
        }
        let (used_at, spec) = (self.table.used_extras().raw(), self.table.spec());
        let mut used = self.memory.load(used_at, Width::W8)?;
        // Requests for other buckets take extra buckets at the same time.
        let extra = loop {
            if used >= u128::from(spec.extras) {
                return Ok(Some(Room::None));
            }
            match self.memory.exchange(used_at, Width::W8, used, used + 1)? {
                Ok(()) => {
                    let extra = spec.buckets + used as u64;
                    if !self.has_keys(extra)? || mutants::EXTRA_TAKEN_TWICE.is_on() {
                        break extra;
                    }
                    // The bucket was filled in a promotion.
                    used += 1;
                }
                Err(found) => used = found,
            }
        };
        self.memory.write(self.table.bucket(0, last).raw() + NEXT_OFFSET, &(extra + 1).to_le_bytes())?;
        Ok(Some(Room::Free(Place { bucket: extra, slot: 0 })))
    }

    /// Whether a slot of a bucket belongs to a key.
    fn has_keys(&self, bucket: u64) -> Result<bool, M::Wait> {
        let mut head = BucketHead::new_zeroed();
        self.memory.read(self.table.bucket(0, bucket).raw(), head.as_mut_bytes())?;
        Ok(head.slots.iter().any(|slot| slot.kind() != SlotKind::Free))
    }

    /// Makes a bucket part of the chain of another one, unless it is. Returns false if that is impossible.
    fn chain(&self, first: u64, bucket: u64) -> Result<bool, M::Wait> {
        let (mut last, spec) = (first, self.table.spec());
        for _ in 0..=spec.extras {
            if last == bucket {
                return Ok(true);
            }
            let next_at = self.table.bucket(0, last).raw() + NEXT_OFFSET;
            last = match (self.memory.load(next_at, Width::W8)? as u64).checked_sub(1) {
                Some(next) if next < spec.all_buckets() => next,
                Some(_) => return Ok(false),
                None if bucket < spec.buckets => return Ok(false),
                None => {
                    self.memory.write(next_at, &(bucket + 1).to_le_bytes())?;
                    bucket
                }
            };
        }
        Ok(last == bucket)
    }

    /// Writes a key and its value, unless the slot has a value that is as new.
    fn put_newer(&self, part: u8, write: &Write<'_>, stamp: u64) -> Result<(), M::Wait> {
        let slot = self.slot(part, write.place)?;
        let is_newer = match slot.kind() {
            // A slot that is being written has no stamp.
            SlotKind::Free | SlotKind::Busy => true,
            SlotKind::Value | SlotKind::Absent => slot.stamp.get() < stamp,
        };
        if is_newer || mutants::PUT_REPLAYED.is_on() { self.put(part, write, stamp) } else { Ok(()) }
    }

    /// Writes a key and its value.
    fn put(&self, part: u8, write: &Write<'_>, stamp: u64) -> Result<(), M::Wait> {
        let (slot_at, pair_at) =
            (self.table.slot(part, write.place).raw(), self.table.pair(part, write.place).raw());
        let value = write.value.unwrap_or_default();
        let slot = |kind: SlotKind| {
            SlotHead::new(self.table.hash(write.key), stamp, write.key.len(), kind, value.len())
        };
        let kind = if write.value.is_some() { SlotKind::Value } else { SlotKind::Absent };
        let half = KIND_OFFSET as usize;
        self.memory.write(slot_at + KIND_OFFSET, &slot(SlotKind::Busy).as_bytes()[half..])?;
        self.memory.write(pair_at, &[write.key, value].concat())?;
        self.memory.write(slot_at, &slot(kind).as_bytes()[..half])?;
        self.memory.write(slot_at + KIND_OFFSET, &slot(kind).as_bytes()[half..])
    }

    fn slot(&self, part: u8, place: Place) -> Result<SlotHead, M::Wait> {
        let mut slot = SlotHead::new_zeroed();
        self.memory.read(self.table.slot(part, place).raw(), slot.as_mut_bytes())?;
        Ok(slot)
    }

    fn lock_header(&self, bucket: u64) -> Result<LockHeader, M::Wait> {
        let mut head = LockHeader::new_zeroed();
        self.memory.read(self.table.bucket(0, bucket).raw(), head.as_mut_bytes())?;
        Ok(head)
    }

    fn set_lock(&self, bucket: u64, head: LockHeader) -> Result<(), M::Wait> {
        self.memory.write(self.table.bucket(0, bucket).raw(), head.as_bytes())
    }

    fn word(&self, number: u64) -> Result<Word, M::Wait> {
        let mut word = Word::new_zeroed();
        self.memory.read(self.table.word(number).raw(), word.as_mut_bytes())?;
        Ok(word)
    }

    /// Writes what has ended of a lane.
    fn end(&self, number: u64, word: Word) -> Result<(), M::Wait> {
        let half = ENDED_OFFSET as usize;
        self.memory.write(self.table.word(number).raw() + ENDED_OFFSET, &word.as_bytes()[half..])
    }

    /// Reads the buckets in a lane's list.
    fn held(&self, number: u64, word: &Word) -> Result<Vec<U64>, M::Wait> {
        let mut held = vec![U64::ZERO; word.held.get().min(self.table.spec().held_max()) as usize];
        if !held.is_empty() {
            self.memory.read(self.table.held(number).raw(), held.as_mut_bytes())?;
        }
        Ok(held)
    }

    /// Reads the record of a lane into `record`. Returns its transaction; none if the record is not whole.
    fn record(&self, number: u64, record: &mut Vec<u8>) -> Result<TxnId, M::Wait> {
        let mut header = RecordHeader::new_zeroed();
        let at = self.table.record(number).raw();
        self.memory.read(at, header.as_mut_bytes())?;
        if header.txn == TxnId::NONE || header.len() > self.table.spec().writes_max as usize {
            return Ok(TxnId::NONE);
        }
        let mut writes = vec![0; header.len()];
        self.memory.read(at + RECORD_SIZE as u64, &mut writes)?;
        if !header.is_sound(&writes) {
            return Ok(TxnId::NONE);
        }
        record.extend_from_slice(header.as_bytes());
        record.extend_from_slice(&writes);
        Ok(header.txn)
    }
}
