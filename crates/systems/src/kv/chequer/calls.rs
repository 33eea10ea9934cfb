//! The calls of clients to the service, which both of Chequer's clients make.

use super::layout::{Spec, Stamp, Table, VALUE_MAX, crc_of};
use super::mutants;
use super::request::{Answer, Outcome, PART_MAX, Request, number_in};
use super::service::RESERVATIONS_MAX;
use crate::kv::{KvError, check_key};
use crate::members::all;
use crate::ready::pauses;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::{DEADLINE, Ran};
use farside_remote::service::address;
use farside_remote::{Fabric, FabricError, NodeId};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Number of times that a client reads a value that is replaced meanwhile.
pub const ATTEMPTS_MAX: u32 = 16;

/// Reason and remedy in the error about a full table.
const NO_GROWTH: &str = "tables of this kind do not grow: create the store for more items (--items)";

pub(super) const DAMAGED: &str = "a record or value that no service wrote";

/// A client's side of the calls. It makes one at a time, except for the parts of long values.
pub(super) struct Calls<F> {
    pub(super) fabric: F,
    pub(super) node: NodeId,
    pub(super) store: Store,
    pub(super) table: Table,
    request: Vec<u8>,
    pub(super) answer: Vec<u8>,
    /// The last value that did not fit into one answer or reply.
    pub(super) value: Vec<u8>,
    /// Reservations of puts that have not ended, or not with a known outcome: their sessions' numbers, and their own. A
    /// RESERVE may not have been answered yet.
    unfinished: Vec<(u64, u64)>,
}

/// Where a value lies that calls have read.
pub(super) enum Got {
    /// In the answer.
    Answer,
    /// In [`Calls::value`].
    Value,
}

/// Result of reading a value by one call or several.
enum Whole {
    /// The value, with its stamp; `None` if the key has none.
    Is(Option<(Got, Stamp)>),
    /// The value was replaced between two calls.
    Changed,
}

/// Returns a number that it returns once in the life of the process. A session belongs to one process, so no two
/// reservations of a session have the same.
fn unique() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    // Relaxed: nothing but the number itself is shared.
    NEXT.fetch_add(1, Ordering::Relaxed)
}

/// Pause of a client that waits for the store's log.
pub(super) const BEHIND_PAUSE: Duration = Duration::from_millis(5);

/// For how long a client has waited for the store's log.
#[derive(Default)]
pub(super) struct Behind {
    until: Option<Duration>,
}

impl Behind {
    /// Whether a request failed because the log is behind, and the client has not waited for the time of a call yet.
    pub(super) fn may_pass(&mut self, clock: &impl Clock, error: &FabricError) -> bool {
        error.is_log_behind() && clock.now() < *self.until.get_or_insert_with(|| clock.now() + DEADLINE)
    }
}

/// A reserved block.
#[derive(Clone, Copy)]
pub(super) struct Reserved {
    pub(super) number: u64,
    pub(super) at: u64,
}

impl<F: Fabric + Clock> Calls<F> {
    /// # Errors
    /// The description is invalid.
    pub(super) fn of(fabric: F, node: NodeId, store: Store) -> Result<Calls<F>, String> {
        let table = Table::new(&store.parameters, store.extent())?;
        let (request, answer, value) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Calls { fabric, node, store, table, request, answer, value, unfinished: Vec::new() })
    }

    pub(super) fn spec(&self) -> &Spec {
        self.table.spec()
    }

    /// Reads the value of `key`, with its stamp. A value of several parts is read again while it is replaced between
    /// two of them. From the [`ATTEMPTS_MAX`]th time on, the service holds it until the last part was read.
    pub(super) async fn get(&mut self, key: &[u8]) -> Result<Option<(Got, Stamp)>, KvError> {
        for _ in 0..ATTEMPTS_MAX {
            let first = Request::Get { key, offset: 0, stamp: Stamp(0) };
            if let Whole::Is(got) = self.get_parts(&first, key).await? {
                return Ok(got);
            }
        }
        // The service may hold too many values for others.
        for pause in std::iter::once(Duration::ZERO).chain(pauses()) {
            if !pause.is_zero() {
                self.fabric.sleep(pause).await;
            }
            if let Whole::Is(got) = self.get_parts(&Request::Hold { key }, key).await? {
                return Ok(got);
            }
        }
        let reason = "the value was replaced each time while its parts were read, and the node holds too many values \
                      for other clients: nothing was read; retry, use smaller values, or use a chequer store, whose \
                      clients read values without calls";
        Err(KvError::Fabric(FabricError::Refused(reason.into())))
    }

    /// Makes the call for the first part of a value, and then those for the others. Ends the hold if `first` has begun
    /// one.
    async fn get_parts(&mut self, first: &Request<'_>, key: &[u8]) -> Result<Whole, KvError> {
        self.call(first).await.map_err(KvError::of_read)?;
        let (stamp, len, part) = match self.answered()? {
            Answer { outcome: Outcome::Done, stamp, first, value, .. } => (stamp, first as usize, value),
            Answer { outcome: Outcome::Absent, .. } => return Ok(Whole::Is(None)),
            answer => return Err(self.error(answer.outcome)),
        };
        if part.len() == len {
            return Ok(Whole::Is(Some((Got::Answer, stamp))));
        }
        if len > VALUE_MAX || part.is_empty() {
            return Err(KvError::Damaged(DAMAGED));
        }
        let is_whole = self.get_rest(key, stamp, len).await?;
        if matches!(first, Request::Hold { .. }) {
            let mut answer = Vec::new(); // The first part's answer is still needed.
            let service = address(self.table.key(), &mut self.request);
            Request::Release { key, stamp }.encode(&mut self.request);
            let _else_it_ends_by_itself =
                self.fabric.call(self.node, service, &self.request, &mut answer).await;
        }
        Ok(if is_whole { Whole::Is(Some((Got::Value, stamp))) } else { Whole::Changed })
    }

    /// Reads the parts of a value after the one in the answer, all at once. Returns false if the value has changed.
    async fn get_rest(&mut self, key: &[u8], stamp: Stamp, len: usize) -> Result<bool, KvError> {
        let Calls { fabric, node, table, answer, value, .. } = self;
        let part = Answer::decode(answer).map_or(&[][..], |answer| answer.value);
        value.clear();
        value.extend_from_slice(part);
        let first = part.len();
        let (fabric, node, key_of_store) = (&*fabric, *node, table.key());
        let parts = (first..len).step_by(PART_MAX).map(async |offset| {
            let (mut request, mut answer) = (Vec::new(), Vec::new());
            let service = address(key_of_store, &mut request);
            Request::Get { key, offset: offset as u32, stamp }.encode(&mut request);
            fabric.call(node, service, &request, &mut answer).await.map(|()| answer)
        });
        for answer in all(parts).await {
            let answer = answer.map_err(KvError::of_read)?;
            match Answer::decode(&answer) {
                Some(Answer { outcome: Outcome::Done, value: part, .. }) => value.extend_from_slice(part),
                Some(Answer { outcome: Outcome::Changed | Outcome::Absent, .. }) => return Ok(false),
                Some(answer) => return Err(self.error(answer.outcome)),
                None => return Err(self.unknown_answer()),
            }
        }
        if value.len() == len { Ok(true) } else { Err(KvError::Damaged(DAMAGED)) }
    }

    /// Whether `key` has a value.
    pub(super) async fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.call(&Request::Contains { key }).await.map_err(KvError::of_read)?;
        match self.answered()?.outcome {
            Outcome::Done => Ok(true),
            Outcome::Absent => Ok(false),
            outcome => Err(self.error(outcome)),
        }
    }

    /// Stores a value of at most [`PART_MAX`] bytes, in mode 1. Returns its stamp.
    pub(super) async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<Stamp, KvError> {
        let request = Request::Put { key, value };
        self.until_ready(&request, KvError::of_install).await
    }

    /// Deletes `key`. Returns whether it had a value.
    pub(super) async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        check_key(key)?;
        self.call_logged(&Request::Delete { key }).await.map_err(KvError::of_install)?;
        match self.answered()?.outcome {
            Outcome::Done => Ok(true),
            Outcome::Absent => Ok(false),
            outcome => Err(self.error(outcome)),
        }
    }

    /// Reserves a block for a value: the first call of mode 2.
    pub(super) async fn reserve(&mut self, key: &[u8], value: &[u8]) -> Result<Reserved, KvError> {
        let number = number_in(self.table.home(key).partition, unique());
        let request = Request::Reserve { key, number, len: value.len() as u32, crc: crc_of(key, value) };
        // Noted before the call, since the put may be dropped before the answer.
        let session = self.fabric.session_number(self.node);
        if !mutants::UNANSWERED_RESERVE_FORGOTTEN.is_on() {
            self.unfinished.push((session, number));
        }
        let reserved = self.until_ready(&request, KvError::of_install).await;
        if mutants::UNANSWERED_RESERVE_FORGOTTEN.is_on() {
            self.unfinished.push((session, number));
        }
        match reserved {
            Ok(_) => Ok(Reserved { number, at: self.answered()?.second }),
            // The block may be reserved. The put was not carried out: no COMMIT was sent.
            Err(KvError::Fabric(error)) if error.ran() == Ran::Unknown => Err(KvError::of_read(error)),
            Err(error) => {
                self.forget(number);
                Err(error)
            }
        }
    }

    /// Notes that a put has ended, so that its reservation is not withdrawn later.
    pub(super) fn forget(&mut self, number: u64) {
        self.unfinished.retain(|(_, unfinished)| *unfinished != number);
    }

    /// Whether there are reservations of puts whose futures were dropped, or whose outcome is unknown.
    pub(super) fn has_unfinished(&self) -> bool {
        !self.unfinished.is_empty()
    }

    /// Gives back the blocks that puts have reserved whose futures were dropped, once none of their WRITEs can be on
    /// its way. A COMMIT that is still on its way then finds no reservation, and does nothing.
    #[cold]
    pub(super) async fn withdraw_unfinished(&mut self) {
        if self.fabric.may_run_abandoned(self.node) {
            return;
        }
        while let Some(&(session, number)) = self.unfinished.last() {
            // The end of a session ends its reservations.
            let is_open = session == self.fabric.session_number(self.node);
            if is_open && self.call(&Request::Withdraw { number }).await.is_err() {
                return;
            }
            self.forget(number);
        }
    }

    /// Writes a block by calls, all at once, for a client that writes no memory.
    pub(super) async fn write(&mut self, number: u64, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let mut block = std::mem::take(&mut self.value);
        block.clear();
        super::layout::put_block(&mut block, key, value);
        let (fabric, node, key_of_store) = (&self.fabric, self.node, self.table.key());
        let parts = block.chunks(PART_MAX).zip((0..).step_by(PART_MAX)).map(async |(bytes, offset)| {
            let (mut request, mut answer) = (Vec::new(), Vec::new());
            let service = address(key_of_store, &mut request);
            Request::Write { number, offset, bytes }.encode(&mut request);
            fabric.call(node, service, &request, &mut answer).await.map(|()| answer)
        });
        let answers = all(parts).await;
        self.value = block;
        for answer in answers {
            let answer = answer.map_err(KvError::of_read)?;
            match Answer::decode(&answer).map(|answer| answer.outcome) {
                Some(Outcome::Done) => {}
                Some(outcome) => return Err(self.error(outcome)),
                None => return Err(self.unknown_answer()),
            }
        }
        Ok(())
    }

    /// Stores the value in a reserved block: the last call of mode 2. It is never made again, whatever becomes of it.
    pub(super) async fn commit(&mut self, number: u64) -> Result<Stamp, KvError> {
        self.call(&Request::Commit { number }).await.map_err(KvError::of_install)?;
        match self.answered()? {
            Answer { outcome: Outcome::Done, stamp, .. } => Ok(stamp),
            answer => {
                let error = self.error(answer.outcome);
                self.withdraw(number).await;
                Err(error)
            }
        }
    }

    /// Gives a reserved block back, to which no WRITE is on its way. If the call fails, the end of the session does it.
    pub(super) async fn withdraw(&mut self, number: u64) {
        let _ = self.call(&Request::Withdraw { number }).await;
    }

    /// Makes a call, again while the area of values has no space but may have some soon. Returns the answer's stamp.
    async fn until_ready(
        &mut self,
        request: &Request<'_>,
        of: impl Fn(FabricError) -> KvError,
    ) -> Result<Stamp, KvError> {
        let mut pauses = pauses();
        loop {
            self.call_logged(request).await.map_err(&of)?;
            match self.answered()? {
                Answer { outcome: Outcome::Done, stamp, .. } => return Ok(stamp),
                Answer { outcome: Outcome::OutOfMemory, .. } => match pauses.next() {
                    Some(pause) => self.fabric.sleep(pause).await,
                    None => return Err(KvError::OutOfMemory),
                },
                answer => return Err(self.error(answer.outcome)),
            }
        }
    }

    /// Makes a call that the store's log may refuse because it is behind. Makes it again until the log has space.
    async fn call_logged(&mut self, request: &Request<'_>) -> Result<(), FabricError> {
        let mut behind = Behind::default();
        loop {
            match self.call(request).await {
                Err(error) if behind.may_pass(&self.fabric, &error) => self.fabric.sleep(BEHIND_PAUSE).await,
                called => return called,
            }
        }
    }

    async fn call(&mut self, request: &Request<'_>) -> Result<(), FabricError> {
        let service = address(self.table.key(), &mut self.request);
        request.encode(&mut self.request);
        self.fabric.call(self.node, service, &self.request, &mut self.answer).await
    }

    /// The value, or the part of it, that the last answer has.
    pub(super) fn value_in_answer(&self) -> &[u8] {
        Answer::decode(&self.answer).map_or(&[], |answer| answer.value)
    }

    /// The CRC of the block of the value of which the last answer has the first part.
    pub(super) fn crc_in_answer(&self) -> u64 {
        Answer::decode(&self.answer).map_or(0, |answer| answer.second)
    }

    fn answered(&self) -> Result<Answer<'_>, KvError> {
        Answer::decode(&self.answer).ok_or_else(|| self.unknown_answer())
    }

    /// Returns the error for an outcome with which no operation succeeds. Nothing was changed.
    fn error(&self, outcome: Outcome) -> KvError {
        match outcome {
            Outcome::OutOfMemory => KvError::OutOfMemory,
            Outcome::TableFull => KvError::TableFull(NO_GROWTH.into()),
            Outcome::Damaged => KvError::Damaged(DAMAGED),
            Outcome::TooManyReservations => KvError::Fabric(FabricError::Refused(format!(
                "put failed: its session has {RESERVATIONS_MAX} values on their way to one partition of the store, the \
                 maximum; nothing was stored; retry once other puts have ended, or use more sessions"
            ))),
            Outcome::NotReserved | Outcome::NotWritten => KvError::Fabric(FabricError::Lost {
                node: self.node,
                ran: Ran::No,
                reason: "the node does not have the bytes of the value that this client wrote".into(),
            }),
            Outcome::Done | Outcome::Absent | Outcome::Changed => self.unknown_answer(),
        }
    }

    fn unknown_answer(&self) -> KvError {
        KvError::Fabric(FabricError::Lost {
            node: self.node,
            ran: Ran::Unknown,
            reason: "the store's answer is unknown to this release: use the same release on both sides"
                .into(),
        })
    }
}

/// # Errors
/// The key or the value is too long for a store of Chequer's kinds.
pub(super) fn check_put(key: &[u8], value: &[u8]) -> Result<(), KvError> {
    check_key(key)?;
    let len = key.len() + value.len();
    let max = key.len() + VALUE_MAX;
    if len > max { Err(KvError::PairLength { len, max }) } else { Ok(()) }
}
