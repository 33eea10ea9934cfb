//! The services of stores, shared by the threads of a node.
//!
//! The thread that receives a call runs the service, so a call needs no other thread. That thread is an engine for its
//! sessions, the node's thread for shm clients, or the caller's own thread for a caller in this process.
//! Invariant: work of a service runs only while its locks are held, and they are held only while it runs. Work with a
//! lock in common runs one after another, all other work in parallel.
//! Invariant: a service is changed only while none of its work runs.
//! Invariant: the thread that runs a call is in a turn of a session's slot, or is the node's own thread. Before the
//! node frees any part of a store, it revokes the store's key and waits until all such turns have ended.

use crate::log::{Appended, StoreLog};
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::fabric::{CALL_BYTES_MAX, UNKNOWN};
use farside_remote::leases::LeaseTable;
use farside_remote::service::{Call, Context, Locks, Records, Service, Tick, Work};
use farside_remote::{Key, Memory, Rights};
use std::collections::BTreeMap;
use std::convert::Infallible;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};
use std::sync::{RwLock, RwLockReadGuard, RwLockWriteGuard};
use std::time::Duration;

/// The service of one store, with the store's key.
pub struct Served<M: Memory> {
    region: u32,
    /// The secret of the store's key, which each change of the store's configuration replaces.
    secret: AtomicU64,
    is_wide: bool,
    leases: Option<LeaseTable>,
    locks: HeldLocks,
    /// The store's log, if it has one.
    log: OnceLock<Arc<StoreLog>>,
    /// Sessions with calls whose second part is still to come, each with the number of these calls.
    unfinished: Mutex<BTreeMap<u32, u32>>,
    /// Read by all work, written only to give the store another table.
    service: RwLock<Box<dyn Service<M>>>,
}

/// The parts of a piece of work's context that do not lie in memory. They are the same each time that the work runs
/// again.
#[derive(Clone, Copy, Debug)]
pub struct Start {
    /// Time when the work began ([`Context::now`]).
    pub now: Duration,
    /// Seed of the work's random draws ([`Context::random`]).
    pub seed: u64,
}

/// A call as it reaches a store's service.
#[derive(Clone, Copy, Debug)]
pub struct Calling<'a> {
    /// The key that the caller used, which must be the store's own.
    pub key: Key,
    /// The caller's rights.
    pub rights: Rights,
    /// Number of the caller's session, if it has one.
    pub session: Option<u32>,
    /// The request, without the store's secret. Untrusted input.
    pub request: &'a [u8],
}

impl<M: Memory> Served<M> {
    /// Creates the shared service of `store`.
    pub fn new(store: &Store, service: Box<dyn Service<M>>) -> Arc<Served<M>> {
        let (key, leases) = (store.extent().key, service.leases());
        let (region, secret) = (key.region(), AtomicU64::new(key.secret()));
        let (locks, service) = (HeldLocks::default(), RwLock::new(service));
        let (is_wide, log, unfinished) = (store.wide, OnceLock::new(), Mutex::default());
        Arc::new(Served { region, secret, is_wide, leases, locks, log, unfinished, service })
    }

    /// Creates the shared service of the same store with another table. It keeps the log.
    pub(crate) fn succeeded_by(&self, store: &Store, service: Box<dyn Service<M>>) -> Arc<Served<M>> {
        let next = Served::new(store, service);
        self.log().into_iter().for_each(|log| next.set_log(Arc::clone(log)));
        next
    }

    /// The store's log, if it has one.
    pub fn log(&self) -> Option<&Arc<StoreLog>> {
        self.log.get()
    }

    /// The outcome of a call's records, once it is known.
    pub fn outcome(&self, begun: &Begun) -> Option<Result<(), String>> {
        self.log().map_or(Some(Ok(())), |log| log.lock().outcome(begun.position))
    }

    /// Waits until the outcome of a call's records is known.
    pub(crate) fn wait_for(&self, begun: &Begun) {
        if let Some(log) = self.log() {
            // The caller asks for the outcome.
            let _ = log.wait_for(begun.position);
        }
    }

    /// The numbers that the service reports, then those of its log.
    pub fn report(&self) -> Vec<(&'static str, u64)> {
        let mut report = self.service.read().unwrap_or_else(PoisonError::into_inner).report();
        report.extend(self.log().into_iter().flat_map(|log| log.lock().report()));
        report
    }

    /// Whether a session has calls whose second part is still to come.
    pub(crate) fn has_unfinished(&self, session: u32) -> bool {
        self.unfinished().contains_key(&session)
    }

    fn unfinished(&self) -> MutexGuard<'_, BTreeMap<u32, u32>> {
        self.unfinished.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Gives the store a log, before clients learn of the store.
    ///
    /// # Panics
    /// It has another log.
    pub fn set_log(&self, log: Arc<StoreLog>) {
        assert!(self.log.set(log).is_ok(), "a store keeps its log");
    }

    /// The service's table of leases ([`Service::leases`]).
    pub fn leases(&self) -> Option<LeaseTable> {
        self.leases
    }

    /// Returns the store's key.
    pub fn key(&self) -> Key {
        // Relaxed: memory decides which key is valid. A call with another key is refused, or looks for the service
        // again.
        Key::new(self.region, self.secret.load(Ordering::Relaxed))
    }

    /// Replaces the secret of the store's key. Calls with the former one are refused once memory has the new one.
    pub(crate) fn set_secret(&self, secret: u64) {
        self.secret.store(secret, Ordering::Relaxed);
    }

    /// Takes the locks for `work`; waits for work that holds some of them.
    pub fn lock(&self, work: Work<'_>) -> ServiceGuard<'_, M> {
        // The locks come second: a thread that holds some never waits for the node's thread to change the service.
        let service = self.service.read().unwrap_or_else(PoisonError::into_inner);
        let locks = service.locks(work);
        self.locks.take(locks);
        ServiceGuard { served: self, service, locks }
    }

    /// Like [`Served::lock`], but returns `None` if other work holds one of the locks.
    ///
    /// If the caller's memory may return *wait*, the caller must hold the guard until the work is done. Such a caller
    /// must not start a call while a step of the node waits, since a node's step locks services as well.
    pub fn try_lock(&self, work: Work<'_>) -> Option<ServiceGuard<'_, M>> {
        let service = match self.service.try_read() {
            Ok(service) => service,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        let locks = service.locks(work);
        self.locks.try_take(locks).then(|| ServiceGuard { served: self, service, locks })
    }

    /// Locks the service in order to change it. Returns `None` if any work of it runs.
    pub fn try_exclusive(&self) -> Option<RwLockWriteGuard<'_, Box<dyn Service<M>>>> {
        match self.service.try_write() {
            Ok(service) => Some(service),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}

/// Outcome of the first part of a call.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Called {
    /// The response, which is in `answer`, or a refusal.
    Answered(Result<(), String>),
    /// The call has appended records: next comes [`ServiceGuard::append`].
    Appends,
}

/// Buffers of a thread that runs services. They save allocations.
#[derive(Debug, Default)]
pub struct Buffers {
    /// Buffer for the service's own use ([`Context::scratch`]).
    pub scratch: Vec<u8>,
    /// The records that a call appends ([`Context::log`]).
    pub records: Records,
    /// State that the first part of a call leaves for the second ([`Begun::state`]). Its allocation is reused.
    state: Vec<u8>,
}

/// A call whose records are not stored yet.
#[derive(Debug)]
pub struct Begun {
    /// The records' position in the store's log.
    pub position: u64,
    /// Number of the caller's session, if it has one.
    pub session: Option<u32>,
    /// What the first part of the call has left.
    pub state: Vec<u8>,
}

impl<M: Memory<Wait = Infallible>> Served<M> {
    /// Serves a call on memory that never waits. Waits for the call's locks. Returns the response, or the call if its
    /// records are not stored yet: [`Served::finish`] then ends it. Each part of the call begins with a `start` of its
    /// own.
    pub fn serve(
        &self,
        memory: &M,
        mut start: impl FnMut() -> Start,
        calling: Calling<'_>,
        buffers: &mut Buffers,
        answer: &mut Vec<u8>,
    ) -> Result<Option<Begun>, String> {
        let guard = self.lock(Work::Call(calling.request));
        let Ok(called) = guard.call(memory, start(), calling, buffers, answer);
        if let Called::Answered(answered) = called {
            return answered.map(|()| None);
        }
        let mut state = std::mem::take(&mut buffers.state);
        std::mem::swap(&mut state, answer);
        let (state, stored) = match guard.append(&buffers.records, calling.session, state) {
            Ok(begun) => return Ok(Some(begun)),
            Err(at_once) => at_once,
        };
        let Ok(answered) = guard.end(memory, start(), (&state, &stored), buffers, answer);
        buffers.state = state;
        answered.map(|()| None)
    }

    /// Ends a call whose records have this outcome. Waits for the call's locks.
    ///
    /// # Errors
    /// The service refused the call, or the records were not stored.
    pub fn finish(
        &self,
        memory: &M,
        start: Start,
        (begun, stored): (&Begun, &Result<(), String>),
        buffers: &mut Buffers,
        answer: &mut Vec<u8>,
    ) -> Result<(), String> {
        let guard = self.lock(Work::Finish(&begun.state));
        let Ok(answered) = guard.end(memory, start, (&begun.state, stored), buffers, answer);
        guard.forget(begun);
        answered
    }
}

/// A service with the locks for one piece of work.
pub struct ServiceGuard<'a, M: Memory> {
    served: &'a Served<M>,
    service: RwLockReadGuard<'a, Box<dyn Service<M>>>,
    locks: Locks,
}

impl<M: Memory> ServiceGuard<'_, M> {
    /// Serves a call, in a guard for [`Work::Call`] with the same request. May be called again after memory returned
    /// *wait*, with the same `start`, see [`Service::call`].
    pub fn call(
        &self,
        memory: &M,
        start: Start,
        calling: Calling<'_>,
        buffers: &mut Buffers,
        answer: &mut Vec<u8>,
    ) -> Result<Called, M::Wait> {
        answer.clear();
        let (served, Calling { key, rights, session, request }) = (self.served, calling);
        // Memory has the store's current key: that one may have been replaced, or the store may be about to be dropped.
        let opened = if served.region == key.region() { memory.admits(key)? } else { Rights::NONE };
        if opened == Rights::NONE {
            return Ok(Called::Answered(Err(no_store(key))));
        }
        if served.is_wide {
            let refusal = "a store with words of 24 and 32 bytes serves no calls: use chains";
            return Ok(Called::Answered(Err(refusal.into())));
        }
        let call = Call { rights: opened.and(rights), session, request };
        let answered = self.service.call(start.context(memory, buffers), call, answer)?;
        assert!(answer.len() <= CALL_BYTES_MAX, "a service's response exceeds the size of a call");
        if answered.is_ok() && !buffers.records.is_empty() {
            return Ok(Called::Appends);
        }
        Ok(Called::Answered(answered))
    }

    /// Appends the records of a call's first part to the store's log, in the guard of that part. `state` is what that
    /// part has left. Returns the call, whose second part comes once its records are stored
    /// ([`ServiceGuard::forget`]).
    ///
    /// # Errors
    /// The second part comes at once, with this state and this outcome of the records.
    pub fn append(
        &self,
        records: &Records,
        session: Option<u32>,
        state: Vec<u8>,
    ) -> Result<Begun, (Vec<u8>, Result<(), String>)> {
        let Some(log) = self.served.log() else { return Err((state, Ok(()))) };
        let appended = log.lock().append(records);
        log.wake();
        match appended {
            Ok(Appended::At(position)) => {
                if let Some(session) = session {
                    *self.served.unfinished().entry(session).or_default() += 1;
                }
                Ok(Begun { position, session, state })
            }
            Ok(Appended::Stored) => Err((state, Ok(()))),
            Err(reason) => Err((state, Err(reason))),
        }
    }

    /// Notes that the second part of a call was done, in the guard of that part.
    pub fn forget(&self, begun: &Begun) {
        if let Some(log) = self.served.log() {
            log.lock().note_end(begun.position);
        }
        let Some(session) = begun.session else { return };
        let mut unfinished = self.served.unfinished();
        if let Some(calls) = unfinished.get_mut(&session) {
            *calls -= 1;
            if *calls == 0 {
                unfinished.remove(&session);
            }
        }
    }

    /// Serves the second part of a call, in the guard of its first part or in one for [`Work::Finish`]: finishes the
    /// call if its records were stored, else undoes it. `begun` is what the first part has left. May be called again
    /// after memory returned *wait*, with the same `start`, which is not that of the first part.
    pub fn end(
        &self,
        memory: &M,
        start: Start,
        (begun, stored): (&[u8], &Result<(), String>),
        buffers: &mut Buffers,
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        answer.clear();
        let served = self.served;
        // The store may have been dropped in the meantime, with all its memory. A later call may have been answered
        // before, as if this one had ended.
        let key = served.key();
        if memory.admits(key)? == Rights::NONE {
            return Ok(Err(format!("{UNKNOWN}: {}", no_store(key))));
        }
        if let Err(reason) = stored {
            self.service.undo(start.context(memory, buffers), begun)?;
            return Ok(Err(reason.clone()));
        }
        let answered = self.service.finish(start.context(memory, buffers), begun, answer)?;
        assert!(answer.len() <= CALL_BYTES_MAX, "a service's response exceeds the size of a call");
        assert!(buffers.records.is_empty(), "the second part of a call appends no records");
        Ok(answered)
    }

    /// Carries out a record of the store's log ([`Service::replay`]).
    pub fn replay(&self, memory: &M, start: Start, record: &[u8]) -> Result<Result<(), String>, M::Wait> {
        self.service.replay(start.context(memory, &mut Buffers::default()), record)
    }

    /// Compares a record of the store's log with the memory ([`Service::compare`]).
    pub fn compare(&self, memory: &M, record: &[u8]) -> Result<(), M::Wait> {
        self.service.compare(memory, record)
    }

    /// Takes back what the store's memory lacks ([`Service::take_back`]).
    pub fn take_back(&self, memory: &M, records: &mut Records) -> Result<bool, M::Wait> {
        self.service.take_back(memory, records)
    }

    /// Ends the replay of the store's log ([`Service::replayed`]).
    pub fn replayed(&self, memory: &M, start: Start) -> Result<u64, M::Wait> {
        self.service.replayed(start.context(memory, &mut Buffers::default()))
    }

    /// Makes a step of the service's background work, in a guard for [`Work::Tick`].
    pub fn tick(&self, memory: &M, start: Start) -> Result<Tick, M::Wait> {
        let mut buffers = Buffers::default();
        let tick = self.service.tick(start.context(memory, &mut buffers))?;
        assert!(buffers.records.is_empty(), "a step of background work appends no records");
        Ok(tick)
    }

    /// The service, for which the guard holds locks.
    pub fn service(&self) -> &dyn Service<M> {
        &**self.service
    }
}

impl<M: Memory> Drop for ServiceGuard<'_, M> {
    fn drop(&mut self) {
        self.served.locks.release(self.locks);
    }
}

impl Start {
    fn context<'a, M: Memory>(self, memory: &'a M, buffers: &'a mut Buffers) -> Context<'a, M> {
        let Buffers { scratch, records: log, .. } = buffers;
        scratch.clear();
        log.clear();
        Context { memory, now: self.now, random: Draws(self.seed), scratch, log }
    }
}

/// The locks of a service that are held, one bit each.
#[derive(Default)]
struct HeldLocks {
    held: AtomicU64,
    /// Number of threads that sleep, or are about to, until a lock is released.
    sleepers: AtomicU32,
    sleep: Mutex<()>,
    released: Condvar,
}

/// Number of attempts to take a lock before the thread sleeps. A call takes a few microseconds.
const ATTEMPTS: u32 = 100;

impl HeldLocks {
    /// Takes all locks of the set, or none.
    #[inline]
    fn try_take(&self, locks: Locks) -> bool {
        if locks == Locks::NONE {
            return true;
        }
        // SeqCst: pairs with `release`, see `take_one`. It includes Acquire, so that this thread sees what the last
        // holder has done.
        let take = |held| (held & locks.0 == 0).then_some(held | locks.0);
        self.held.fetch_update(Ordering::SeqCst, Ordering::SeqCst, take).is_ok()
    }

    fn take(&self, locks: Locks) {
        if self.try_take(locks) {
            return;
        }
        // In ascending order, so that no two threads wait for each other. Each lock is kept once it is taken, so that
        // work with many locks is not overtaken for ever.
        let mut left = locks.0;
        while left != 0 {
            let next = left & left.wrapping_neg();
            self.take_one(Locks(next));
            left &= !next;
        }
    }

    fn take_one(&self, lock: Locks) {
        for _ in 0..ATTEMPTS {
            if self.try_take(lock) {
                return;
            }
            std::hint::spin_loop();
        }
        let mut sleep = self.sleep.lock().unwrap_or_else(PoisonError::into_inner);
        // SeqCst: either this thread sees the lock released, or the thread that releases it sees a sleeper. That
        // thread then waits for the mutex, which this thread gives up only when it sleeps.
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        while !self.try_take(lock) {
            sleep = self.released.wait(sleep).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }

    #[inline]
    fn release(&self, locks: Locks) {
        if locks == Locks::NONE {
            return;
        }
        self.held.fetch_and(!locks.0, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            drop(self.sleep.lock().unwrap_or_else(PoisonError::into_inner));
            self.released.notify_all();
        }
    }
}

/// Error message for a call to a missing store, or with a key that is not the store's.
pub(crate) fn no_store(key: Key) -> String {
    format!(
        "no store has a service numbered {} for the key of this call: the store was dropped, and perhaps created \
         anew; open it again",
        key.region()
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicBool;

    #[test]
    fn locks_in_common_exclude_each_other_and_others_do_not() {
        let held = HeldLocks::default();
        let [first, second] = [3, 67].map(Locks::of);
        assert_eq!(first, second, "there are {} locks", Locks::COUNT);
        assert!(held.try_take(first) && !held.try_take(second) && !held.try_take(Locks::ALL));
        assert!(held.try_take(Locks::of(4)) && held.try_take(Locks::NONE));
        held.release(first);
        assert!(!held.try_take(first.and(Locks::of(4))), "none of a set is taken unless all are free");
        assert!(held.try_take(second));
        held.release(second.and(Locks::of(4)));
        assert!(held.try_take(Locks::ALL));
    }

    #[test]
    fn threads_with_overlapping_sets_neither_meet_nor_wait_for_ever() {
        const ROUNDS: u64 = 20_000;
        let held = HeldLocks::default();
        let owned: [AtomicBool; 4] = std::array::from_fn(|_| AtomicBool::new(false));
        let (held, owned) = (&held, &owned);
        std::thread::scope(|scope| {
            for thread in 0..4u64 {
                scope.spawn(move || {
                    let mut draws = Draws(thread);
                    for _ in 0..ROUNDS {
                        let set = draws.below(15) + 1;
                        held.take(Locks(set));
                        let of_set = || (0..4).filter(|lock| set >> lock & 1 == 1).map(|lock| &owned[lock]);
                        for lock in of_set() {
                            assert!(!lock.swap(true, Ordering::Relaxed), "two threads hold a lock");
                        }
                        of_set().for_each(|lock| lock.store(false, Ordering::Relaxed));
                        held.release(Locks(set));
                    }
                });
            }
        });
        assert!(held.try_take(Locks::ALL), "every lock was released");
    }
}
