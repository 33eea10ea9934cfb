//! Work of the memory node's CPU for a FaRM store: claims, locks, validation by call, commits, aborts, and truncation.
//!
//! Calls of different lanes run at the same time. They meet at objects, which they lock by an atomic exchange of the
//! header. Claims exclude each other, and so do truncations.
//!
//! A call may end in the middle, with its node, and its caller repeats it at the next node, or aborts the transaction.
//! So a lock call stores the record before it takes a lock, a commit call changes the state to DECIDED before it
//! installs a value, and a truncation marks each copy that it overwrites as locked.
//!
//! Invariant: a lock is taken only for the last transaction of a lane, and only if that one has not ended.
//! Invariant: an object whose header names another transaction is not changed.

use super::layout::{BUCKET_SIZE, BUCKET_SLOTS, Spec, Table, VALUE_MAX, WRITES_MAX, slots_for};
use super::log::{
    ANY_VERSION, RECORD_SIZE, RecordHeader, State, TRUNCATED_OFFSET, TxnId, WRITE_SIZE, Word, WordBytes,
    Write,
};
use super::object::{Content, Header, Reading, are_marked, decode};
use super::request::{Answer, Check, LaneState, Outcome, Request};
use super::{KIND, mutants};
use crate::hash_slots::Placement;
use crate::lines::{HEADER_SIZE, Lines, MARKED, line_version};
use farside_remote::service::{Call, Context, Extent, Kind, Locks, Plan, Service, Work};
use farside_remote::{Memory, Rights, Width};
use serde::{Deserialize, Serialize};
use std::cmp::Ordering;
use std::time::Duration;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, FromZeros, IntoBytes};

/// Node-side half of FaRM.
pub struct FarmKind;

/// Number of client ids, unless the store's creator gives another.
const IDS: u16 = 64;
/// Number of transactions of a client that commit at the same time, unless the store's creator gives another.
const LANES: u16 = 16;
/// Length of the longest value in bytes, unless the store's creator gives another.
const VALUE_LEN: u32 = 1024;
/// Length of the longest key of a value of that length, unless the store's creator gives another.
const KEY_LEN: u32 = 64;
/// Number of the longest pairs that a transaction can write at one member, unless the store's creator gives another
/// limit.
const WRITES: u32 = 4;
/// Size of a line in bytes, unless the store's creator gives another: every fabric copies such a line as a whole.
const LINE: u8 = 16;
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
    pub(super) line: Option<u8>,
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
        let mut spec = Spec {
            slots: 0,
            seed,
            placement: self.placement,
            objects: 0,
            ids: self.ids.unwrap_or(IDS),
            lanes: self.lanes.unwrap_or(LANES),
            lease_us: self.lease_us.unwrap_or(LEASE.as_micros() as u64),
            value_max,
            pair_max,
            writes_max: self.writes_max.unwrap_or_else(chosen),
            backups: self.backups.unwrap_or(0),
            line: self.line.unwrap_or(LINE),
        };
        let sized = |spec: &Spec, objects: u64| {
            let slots = slots_for(objects)
                .ok_or_else(|| format!("{objects} items are too many for one store: give fewer --items"))?;
            Ok::<Spec, String>(Spec { objects, slots, ..*spec })
        };
        spec = sized(&spec, self.items.unwrap_or(1).max(1))?;
        spec.check()?;
        if self.items.is_none() {
            let left = quota.saturating_sub(spec.table_len().unwrap_or(u64::MAX));
            // An object, its copies, and its slots, whose number is rounded up to a power of two.
            let each = spec.object_len() * (1 + u64::from(spec.backups)) + 32;
            spec = sized(&spec, (left / each).max(1))?;
            spec.check()?;
        }
        Ok(spec)
    }
}

impl<M: Memory> Kind<M> for FarmKind {
    fn name(&self) -> &'static str {
        KIND
    }

    fn is_table_only(&self) -> bool {
        true
    }

    fn plan(&self, parameters: &str, quota: u64, entropy: u64) -> Result<Plan, String> {
        let request: NewStore = serde_json::from_str(parameters).map_err(|error| {
            let example = NewStore { items: Some(1000), value_max: Some(VALUE_MAX), ..NewStore::default() };
            let example = serde_json::to_string(&example).expect("plain data");
            format!("a {KIND} store takes parameters such as {example}: {error}")
        })?;
        let spec = request.spec(quota, entropy)?;
        let parameters = serde_json::to_string(&spec).expect("plain data");
        Ok(Plan {
            table_len: spec.table_len().expect("the parameters were checked"),
            parameters,
            wide: false,
        })
    }

    fn serve(&self, parameters: &str, table: Extent) -> Result<Box<dyn Service<M>>, String> {
        Ok(Box::new(FarmService { table: Table::new(parameters, table)? }))
    }
}

struct FarmService {
    table: Table,
}

/// Lock of truncations, which change copies.
const TRUNCATING: Locks = Locks(1);
/// Lock of claims, which change the index.
const CLAIMING: Locks = Locks(2);
/// Number of the other locks, which exclude calls for one lane.
const LANE_LOCKS: u64 = Locks::COUNT as u64 - 2;

/// Reason why a call was refused.
type Refusal = String;
/// Result of an access: a refusal, or a wait for memory.
type Accessed<T, W> = Result<Result<T, Refusal>, W>;

impl<M: Memory> Service<M> for FarmService {
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
                "this operation on a {KIND} store needs the right '{word}', which your token lacks: ask the operator \
                 of the node"
            )));
        }
        let number = match request.entry().map(|entry| self.table.number(entry)) {
            Some(None) => return Ok(Err(NO_LANE.into())),
            number => number.flatten().unwrap_or(0),
        };
        let at = At { table: &self.table, memory: context.memory, number };
        let mut bytes = Vec::new();
        let answered = match request {
            Request::Claim { key } => at.claim(key)?,
            Request::Lock { txn, truncate, writes } => at.lock(txn, truncate, writes)?,
            Request::Abort { txn } => at.abort(txn)?,
            Request::Validate { checks } => at.validate(checks)?,
            Request::Commit { txn, stamp } => at.commit(txn, stamp)?,
            Request::Replicate { txn, part, record } => at.replicate(txn, part, record)?,
            Request::Truncate { txn } => at.truncate(txn)?,
            Request::Look { .. } => {
                at.look(&mut bytes)?;
                Ok(Answer { outcome: Outcome::Done, number: 0, rest: &bytes })
            }
        };
        Ok(answered.map(|given| given.encode(answer)))
    }

    fn locks(&self, work: Work<'_>) -> Locks {
        let Work::Call(request) = work else { return Locks::NONE };
        let Ok(request) = Request::decode(request) else { return Locks::NONE };
        let lane = request.entry().and_then(|entry| self.table.number(entry));
        let lane = lane.map_or(Locks::NONE, |number| Locks::of(2 + number % LANE_LOCKS));
        match request {
            Request::Claim { .. } => CLAIMING,
            Request::Validate { .. } => Locks::NONE,
            Request::Truncate { .. } => lane.and(TRUNCATING),
            Request::Lock { truncate, .. } if truncate != TxnId::NONE => lane.and(TRUNCATING),
            Request::Lock { .. }
            | Request::Abort { .. }
            | Request::Commit { .. }
            | Request::Replicate { .. }
            | Request::Look { .. } => lane,
        }
    }

    fn live(&self, _memory: &M, _cursor: u64, _found: &mut Vec<u64>) -> Result<Option<u64>, M::Wait> {
        Ok(None) // All of the store lies in its table.
    }
}

const NO_LANE: &str =
    "the request names a client or a lane that the store does not have: open the store again";
const NO_WRITES: &str = "the request has writes that are not possible in this store: open the store again";
const DAMAGED: &str =
    "the record of the transaction is damaged: someone who holds the store's key has overwritten it";

/// What the probe path of a key has.
enum Probed {
    /// The object that was wanted.
    Object(u64),
    /// No such object, and a free slot at this address.
    Free(u64),
    /// No such object, and no free slot.
    Full,
}

/// A call in progress.
struct At<'c, M> {
    table: &'c Table,
    memory: &'c M,
    /// Number of the log entry that the call uses.
    number: u64,
}

/// Buffers for objects that are written.
#[derive(Default)]
struct Installing {
    content: Vec<u8>,
    /// The bytes of an object after its header.
    image: Vec<u8>,
}

impl<M: Memory> At<'_, M> {
    /// Finds the object of a key, or gives it one.
    fn claim(&self, key: &[u8]) -> Accessed<Answer<'static>, M::Wait> {
        let spec = self.table.spec();
        if key.len() > spec.pair_max as usize {
            return Ok(Err(NO_WRITES.into()));
        }
        let mut object = Vec::new();
        let found = self.probe(key, |number| {
            let content = self.content(0, number, &mut object)?;
            Ok(content.is_some_and(|content| content.key == key))
        })?;
        let free = match found {
            Probed::Object(number) => return Ok(Ok(Answer::of(Outcome::Done, number))),
            Probed::Free(at) => Some(at),
            Probed::Full => None,
        };
        let used = self.memory.load(self.table.used().raw(), Width::W8)? as u64;
        let number = if self.is_last_unclaimed(used)? { used - 1 } else { used };
        let Some(free) = free.filter(|_| number < spec.objects) else {
            return Ok(Ok(Answer::of(Outcome::TableFull, 0)));
        };
        let (mut content, mut image) = (Vec::new(), Vec::new());
        Content { stamp: 0, key, value: None }.encode(&mut content);
        spec.lines().encode(0, &content, &mut image);
        self.memory.write(self.table.object(0, number).raw() + HEADER_SIZE as u64, &image)?;
        self.memory.write(self.table.used().raw(), &(number + 1).to_le_bytes())?;
        let entry = u128::from(self.table.entry(key, number));
        Ok(match self.memory.exchange(free, Width::W8, 0, entry)? {
            Ok(()) => Ok(Answer::of(Outcome::Done, number)),
            Err(_) => {
                Err("the index is damaged: someone who holds the store's key has overwritten it".into())
            }
        })
    }

    /// Searches the probe path of a key for an object that `is_wanted`.
    fn probe(
        &self,
        key: &[u8],
        mut is_wanted: impl FnMut(u64) -> Result<bool, M::Wait>,
    ) -> Result<Probed, M::Wait> {
        for probed in 0..self.table.path_len() {
            let at = self.table.bucket(key, probed).raw();
            let mut bucket = [U64::ZERO; BUCKET_SLOTS as usize];
            const { assert!(size_of::<[U64; BUCKET_SLOTS as usize]>() as u64 == BUCKET_SIZE) };
            self.memory.read(at, bucket.as_mut_bytes())?;
            for (slot, entry) in (0..).zip(bucket) {
                if entry == U64::ZERO {
                    return Ok(Probed::Free(at + slot * size_of::<U64>() as u64));
                }
                let Some(number) = self.table.object_of(key, entry.get()) else { continue };
                if is_wanted(number)? {
                    return Ok(Probed::Object(number));
                }
            }
        }
        Ok(Probed::Full)
    }

    /// Whether the last object belongs to no key, since the node died during its claim. `used` is the number of
    /// objects.
    fn is_last_unclaimed(&self, used: u64) -> Result<bool, M::Wait> {
        let Some(last) = used.checked_sub(1) else { return Ok(false) };
        let mut object = Vec::new();
        let Some(content) = self.content(0, last, &mut object)? else { return Ok(true) };
        let found = self.probe(content.key, |number| Ok(number == last))?;
        Ok(!matches!(found, Probed::Object(_)))
    }

    /// The content of an object that no call changes, or whose key alone is wanted.
    fn content<'b>(
        &self,
        part: u8,
        object: u64,
        content: &'b mut Vec<u8>,
    ) -> Result<Option<Content<'b>>, M::Wait> {
        let spec = self.table.spec();
        let mut bytes = vec![0; spec.object_len() as usize];
        self.memory.read(self.table.object(part, object).raw(), &mut bytes)?;
        let reading = decode(spec.lines(), &bytes, content, false);
        Ok(if let Reading::Whole(_) = reading { Content::decode(content) } else { None })
    }

    fn lock(&self, txn: TxnId, truncate: TxnId, writes: &[u8]) -> Accessed<Answer<'static>, M::Wait> {
        let decoded = Write::decode_all(writes, self.table.spec());
        let decoded = decoded.filter(|_| writes.len() <= self.table.spec().writes_max as usize);
        let Some(decoded) = decoded else { return Ok(Err(NO_WRITES.into())) };
        if truncate != TxnId::NONE
            && let Err(refusal) = self.truncate(truncate)?
        {
            return Ok(Err(refusal));
        }
        let word = Word::of(&self.word()?);
        let is_late = word.txn >= txn && !mutants::LATE_LOCK_GRANTED.is_on();
        if is_late || word.is_open() {
            return Ok(Ok(Answer::of(Outcome::Stale, 0)));
        }
        let record = self.table.record(self.number, 0).raw();
        // Recoverers copy the record to backups, if there are any. They check whether it is whole.
        let header = match self.table.spec().backups {
            0 => RecordHeader::unchecked(txn, writes),
            _ => RecordHeader::new(txn, 0, writes),
        };
        self.memory.write(record, header.as_bytes())?;
        self.memory.write(record + RECORD_SIZE as u64, writes)?;
        self.set_word(txn, 0, State::Locked)?;
        let (mut taken, mut stamp) = (Vec::new(), 0);
        for write in &decoded {
            let at = self.table.object(0, write.object).raw();
            let header = self.header(at)?;
            let is_expected = [ANY_VERSION, header.version()].contains(&write.expected);
            let is_locked = header.is_locked() || !is_expected || {
                let locked = Header::locked(header.version(), txn);
                self.memory.exchange(at, Width::W16, header.word(), locked.word())?.is_err()
            };
            if is_locked {
                if !mutants::LOCK_LEFT.is_on() {
                    self.free(&taken, txn)?;
                }
                self.set_word(txn, 0, State::Aborted)?;
                let owner = if header.is_locked() { header.owner } else { TxnId::NONE };
                return Ok(Ok(Answer::of(Outcome::Conflict, owner.bits())));
            }
            taken.push(write.object);
            stamp = stamp.max(self.stamp(at)?);
        }
        Ok(Ok(Answer::of(Outcome::Done, stamp)))
    }

    /// Frees those of the objects that a transaction has locked, without a change.
    fn free(&self, objects: &[u64], txn: TxnId) -> Result<(), M::Wait> {
        for object in objects {
            let at = self.table.object(0, *object).raw();
            let header = self.header(at)?;
            if header.is_locked() && header.owner == txn {
                self.memory.write(at, Header::free(header.version()).as_bytes())?;
            }
        }
        Ok(())
    }

    fn abort(&self, txn: TxnId) -> Accessed<Answer<'static>, M::Wait> {
        let word = Word::of(&self.word()?);
        let has_ended = match txn.cmp(&word.txn) {
            Ordering::Less => true,
            Ordering::Equal => matches!(word.state, State::Decided | State::Done),
            Ordering::Greater => word.is_open(),
        };
        if has_ended {
            return Ok(Ok(Answer::of(Outcome::Stale, 0)));
        }
        if word.txn == txn && word.state == State::Locked {
            let mut record = Vec::new();
            let writes = match self.writes(0, txn, &mut record)? {
                Ok(writes) => writes,
                Err(refusal) => return Ok(Err(refusal)),
            };
            let objects: Vec<u64> = writes.iter().map(|write| write.object).collect();
            self.free(&objects, txn)?;
        }
        self.set_word(txn, 0, State::Aborted)?;
        Ok(Ok(Answer::of(Outcome::Done, 0)))
    }

    fn validate(&self, checks: &[Check]) -> Accessed<Answer<'static>, M::Wait> {
        for check in checks {
            if check.object.get() >= self.table.spec().objects {
                return Ok(Err(NO_WRITES.into()));
            }
            let header = self.header(self.table.object(0, check.object.get()).raw())?;
            let is_locked = header.is_locked() && !mutants::LOCK_IGNORED.is_on();
            if is_locked || header.version() != check.version.get() {
                let owner = if header.is_locked() { header.owner } else { TxnId::NONE };
                return Ok(Ok(Answer::of(Outcome::Conflict, owner.bits())));
            }
        }
        Ok(Ok(Answer::of(Outcome::Done, 0)))
    }

    fn commit(&self, txn: TxnId, stamp: u64) -> Accessed<Answer<'static>, M::Wait> {
        let word = Word::of(&self.word()?);
        let stamp = match word.state {
            _ if word.txn != txn => return Ok(Ok(Answer::of(Outcome::Stale, 0))),
            State::Aborted => return Ok(Ok(Answer::of(Outcome::Stale, 0))),
            State::Done => return Ok(Ok(Answer::of(Outcome::Done, 0))),
            State::Decided => word.stamp,
            State::Locked => stamp,
        };
        let mut record = Vec::new();
        let writes = match self.writes(0, txn, &mut record)? {
            Ok(writes) => writes,
            Err(refusal) => return Ok(Err(refusal)),
        };
        self.set_word(txn, stamp, State::Decided)?;
        let (lines, mut own) = (self.table.spec().lines(), Installing::default());
        for write in writes {
            let at = self.table.object(0, write.object).raw();
            let header = self.header(at)?;
            if !header.is_locked() || header.owner != txn {
                continue; // An earlier attempt has installed it.
            }
            install(self.memory, lines, at, header.version() + 1, &write.content(stamp), &mut own)?;
        }
        self.set_word(txn, stamp, State::Done)?;
        Ok(Ok(Answer::of(Outcome::Done, 0)))
    }

    fn replicate(&self, txn: TxnId, part: u64, record: &[u8]) -> Accessed<Answer<'static>, M::Wait> {
        let spec = self.table.spec();
        let part = u8::try_from(part).ok().filter(|part| (1..=spec.backups).contains(part));
        let is_sound = RecordHeader::ref_from_prefix(record).is_ok_and(|(header, writes)| {
            let is_own = header.txn == txn && header.len() == writes.len() && header.is_sound(writes);
            is_own && writes.len() <= spec.writes_max as usize && Write::decode_all(writes, spec).is_some()
        });
        let Some(part) = part.filter(|_| is_sound) else { return Ok(Err(NO_WRITES.into())) };
        let whole = self.whole_record(part, &mut Vec::new())?;
        if txn <= Word::of(&self.word()?).truncated || whole.is_some_and(|(other, _)| other >= txn) {
            return Ok(Ok(Answer::of(Outcome::Stale, 0)));
        }
        self.memory.write(self.table.record(self.number, part).raw(), record)?;
        Ok(Ok(Answer::of(Outcome::Done, 0)))
    }

    fn truncate(&self, upto: TxnId) -> Accessed<Answer<'static>, M::Wait> {
        let truncated = Word::of(&self.word()?).truncated;
        let done = Answer::of(Outcome::Done, 0);
        if truncated >= upto {
            return Ok(Ok(done));
        }
        let (lines, mut own, mut record) = (self.table.spec().lines(), Installing::default(), Vec::new());
        for part in 1..=self.table.spec().backups {
            let Some((txn, stamp)) = self.whole_record(part, &mut record)? else { continue };
            if txn <= truncated || txn > upto {
                continue;
            }
            let Some(writes) = Write::decode_all(&record, self.table.spec()) else {
                return Ok(Err(DAMAGED.into()));
            };
            for write in writes {
                let at = self.table.object(part, write.object).raw();
                let header = self.header(at)?;
                // A copy that is locked was being overwritten when the node died.
                let is_older = header.is_locked() || self.stamp(at)? < stamp;
                if !is_older && !mutants::OLDER_APPLIED.is_on() {
                    continue;
                }
                self.memory.write(at, Header::locked(header.version(), txn).as_bytes())?;
                install(self.memory, lines, at, header.version() + 1, &write.content(stamp), &mut own)?;
            }
        }
        self.memory.write(self.table.word(self.number).raw() + TRUNCATED_OFFSET, upto.as_bytes())?;
        Ok(Ok(done))
    }

    fn look(&self, out: &mut Vec<u8>) -> Result<(), M::Wait> {
        let word = self.word()?;
        let truncated = Word::of(&word).truncated;
        let (mut records, mut record) = (Vec::new(), Vec::new());
        for part in 1..=self.table.spec().backups {
            let whole = self.whole_record(part, &mut record)?;
            records.extend(whole.filter(|(txn, _)| *txn > truncated));
        }
        LaneState::encode(&word, &records, out);
        Ok(())
    }

    /// Reads the record of a backup and puts its writes into `writes`. Returns its transaction and stamp; `None` if it
    /// is not whole.
    fn whole_record(&self, part: u8, writes: &mut Vec<u8>) -> Result<Option<(TxnId, u64)>, M::Wait> {
        let header = self.record(part, writes)?;
        let is_sound = header.is_some_and(|header| header.is_sound(writes));
        Ok(header.filter(|_| is_sound).map(|header| (header.txn, header.stamp.get())))
    }

    /// Reads a record, and puts its writes into `writes`. Returns its header; `None` if its length is impossible.
    fn record(&self, part: u8, writes: &mut Vec<u8>) -> Result<Option<RecordHeader>, M::Wait> {
        let at = self.table.record(self.number, part).raw();
        let mut header = RecordHeader::new_zeroed();
        self.memory.read(at, header.as_mut_bytes())?;
        writes.clear();
        if header.len() > self.table.spec().writes_max as usize {
            return Ok(None);
        }
        writes.resize(header.len(), 0);
        self.memory.read(at + RECORD_SIZE as u64, writes)?;
        Ok(Some(header))
    }

    /// Reads the writes of a transaction from its record.
    fn writes<'b>(&self, part: u8, txn: TxnId, record: &'b mut Vec<u8>) -> Accessed<Vec<Write<'b>>, M::Wait> {
        let header = self.record(part, record)?;
        let is_own = header.is_some_and(|header| header.txn == txn);
        let writes = Write::decode_all(record, self.table.spec()).filter(|_| is_own);
        Ok(writes.ok_or_else(|| DAMAGED.to_owned()))
    }

    fn word(&self) -> Result<WordBytes, M::Wait> {
        let mut word = WordBytes::new_zeroed();
        self.memory.read(self.table.word(self.number).raw(), word.as_mut_bytes())?;
        Ok(word)
    }

    fn set_word(&self, txn: TxnId, stamp: u64, state: State) -> Result<(), M::Wait> {
        self.memory.write(self.table.word(self.number).raw(), &Word::half(txn, stamp, state))
    }

    fn header(&self, at: u64) -> Result<Header, M::Wait> {
        Ok(Header::of_word(self.memory.load(at, Width::W16)?))
    }

    /// Reads the stamp of an object that this call has locked.
    fn stamp(&self, at: u64) -> Result<u64, M::Wait> {
        let mut stamp = U64::ZERO;
        self.memory.read(at + self.table.spec().lines().content_at() as u64, stamp.as_mut_bytes())?;
        Ok(stamp.get())
    }
}

/// Writes the content of an object that is locked, and frees the object with its new version.
///
/// A NIC may copy a line between two pieces of a CPU's write. So the lines are marked before their content changes, and
/// get the version after it (FaRM, NSDI'14, section 4.2).
fn install<M: Memory>(
    memory: &M,
    lines: Lines,
    at: u64,
    version: u64,
    content: &Content<'_>,
    own: &mut Installing,
) -> Result<(), M::Wait> {
    let Installing { content: bytes, image } = own;
    content.encode(bytes);
    lines.encode(version, bytes, image);
    let rest = at + HEADER_SIZE as u64;
    let write_versions = |len: usize, bytes: &[u8]| {
        let mut offsets = lines.versions_at(len).map(|offset| rest + offset as u64);
        offsets.try_for_each(|version_at| memory.write(version_at, bytes))
    };
    if are_marked(lines) {
        write_versions(image.len(), &MARKED)?;
        lines.mark(image);
    }
    memory.write(rest, image)?;
    if are_marked(lines) {
        write_versions(image.len(), &line_version(version))?;
    }
    memory.write(at, Header::free(version).as_bytes())
}

#[cfg(test)]
mod tests {
    use super::super::layout::LINES;
    use super::*;
    use farside_remote::Key;
    use farside_remote::arena::Geometry;
    use std::cell::{Cell, RefCell};
    use std::convert::Infallible;

    const OBJECT: usize = 256;
    /// Number of bytes that a CPU writes at once.
    const UNIT: usize = 16;

    /// Memory of one object, which is written in units. Keeps the object as it is after each unit.
    struct InUnits {
        object: RefCell<Vec<u8>>,
        seen: RefCell<Vec<Vec<u8>>>,
        /// Whether the units of a write have descending addresses.
        descends: Cell<bool>,
    }

    impl Memory for InUnits {
        type Wait = Infallible;

        fn geometry(&self) -> Geometry {
            unreachable!("an object is written by its address")
        }

        fn admits(&self, _: Key) -> Result<Rights, Infallible> {
            unreachable!("an object is written without a key")
        }

        fn reach(&self, _: u32, _: u64, _: u64) -> Result<u64, Infallible> {
            unreachable!("an object is written by its address")
        }

        fn read(&self, _: u64, _: &mut [u8]) -> Result<(), Infallible> {
            unreachable!("an object is written without a read")
        }

        fn write(&self, at: u64, bytes: &[u8]) -> Result<(), Infallible> {
            let (at, mut object) = (at as usize, self.object.borrow_mut());
            let units = (at / UNIT..(at + bytes.len()).div_ceil(UNIT)).map(|unit| {
                let from = (unit * UNIT).max(at);
                (from, ((unit + 1) * UNIT).min(at + bytes.len()))
            });
            let mut units: Vec<(usize, usize)> = units.collect();
            if self.descends.get() {
                units.reverse();
            }
            for (from, to) in units {
                object[from..to].copy_from_slice(&bytes[from - at..to - at]);
                self.seen.borrow_mut().push(object.clone());
            }
            Ok(())
        }

        fn load(&self, _: u64, _: Width) -> Result<u128, Infallible> {
            unreachable!("an object is written without a read")
        }

        fn exchange(&self, _: u64, _: Width, _: u128, _: u128) -> Result<Result<(), u128>, Infallible> {
            unreachable!("the caller has locked the object")
        }
    }

    /// Writes an object of each size of a line, with values of each pair of lengths, and makes objects of each line of
    /// an instant within lines of the old object and of the new one. Returns whether all whole ones are old or new.
    fn is_no_mixture_accepted() -> bool {
        let mut is_sound = true;
        for (line, descends) in LINES.into_iter().flat_map(|line| [(line, false), (line, true)]) {
            for [old_len, new_len] in [[150, 150], [150, 20], [20, 150], [1, 1]] {
                let lines = Lines::of(line);
                let image = |version: u64, content: &Content<'_>| {
                    let (mut bytes, mut image) = (Vec::new(), Vec::new());
                    content.encode(&mut bytes);
                    lines.encode(version, &bytes, &mut image);
                    [Header::free(version).as_bytes(), &image].concat()
                };
                let (old_value, new_value) = (vec![1; old_len], vec![2; new_len]);
                let old = Content { stamp: 5, key: b"key", value: Some(&old_value) };
                let new = Content { stamp: 6, key: b"key", value: Some(&new_value) };
                let mut object = image(7, &old);
                object.resize(OBJECT, 0);
                object[..HEADER_SIZE].copy_from_slice(Header::locked(7, TxnId::of_bits(9)).as_bytes());
                let memory = InUnits {
                    object: RefCell::new(object.clone()),
                    seen: RefCell::default(),
                    descends: Cell::new(descends),
                };
                let Ok(()) = install(&memory, lines, 0, 8, &new, &mut Installing::default());
                let after = memory.object.borrow().clone();
                object[..HEADER_SIZE].copy_from_slice(Header::free(7).as_bytes());
                let mut content = Vec::new();
                for (whole, wanted, version) in [(&object, old, 7), (&after, new, 8)] {
                    assert_eq!(decode(lines, whole, &mut content, true), Reading::Whole(version));
                    assert_eq!(Content::decode(&content), Some(wanted));
                    for seen in &*memory.seen.borrow() {
                        for at in (0..OBJECT).step_by(line.into()) {
                            let mut read = whole.clone();
                            let of_line = at..at + usize::from(line);
                            read[of_line.clone()].copy_from_slice(&seen[of_line]);
                            if let Reading::Whole(_) = decode(lines, &read, &mut content, true) {
                                let found = Content::decode(&content);
                                is_sound &= found == Some(old) || found == Some(new);
                            }
                        }
                    }
                }
            }
        }
        is_sound
    }

    #[test]
    fn a_read_of_lines_at_different_instants_of_a_write_is_no_mixture() {
        assert!(is_no_mixture_accepted());
    }

    #[cfg(farside_mutants)]
    #[test]
    fn a_read_of_lines_at_different_instants_is_a_mixture_if_lines_are_not_marked() {
        farside_remote::mutant::Mutant::switch(Some(mutants::LINES_UNMARKED));
        let is_sound = is_no_mixture_accepted();
        farside_remote::mutant::Mutant::switch(None);
        assert!(!is_sound);
    }
}
