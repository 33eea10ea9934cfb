//! The services of stores, and how the threads of a node share one.
//!
//! Whoever carries a call runs the service: an engine its sessions' calls, the node's thread those of shm clients, a
//! caller of this process its own. So a call takes no trip through another thread. Invariant: a service is in one call
//! at a time, and its lock is held for no longer than that. Invariant: who runs a call is in a turn of a session's
//! slot, or is the node's own thread: a store's key opens nothing, and all such turns have ended, before anything of
//! it is taken back.

use farside_remote::control::Store;
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::service::{Call, Service};
use farside_remote::{Key, Memory, Rights};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// The service of one store.
pub struct Served<M: Memory> {
    key: Key,
    is_wide: bool,
    service: Mutex<Box<dyn Service<M>>>,
}

impl<M: Memory> Served<M> {
    /// That of `store`.
    pub fn new(store: &Store, service: Box<dyn Service<M>>) -> Arc<Served<M>> {
        Arc::new(Served { key: store.extent().key, is_wide: store.wide, service: Mutex::new(service) })
    }

    /// The store's key.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Waits until the service is in nobody's call.
    pub fn attend(&self) -> Attended<'_, M> {
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
        Attended { served: self, service }
    }

    /// As [`Served::attend`]; nothing if it is in somebody's call. Who lets memory answer *wait* must hold what this
    /// answers until the call is answered; and while a step of the node waits, which looks through services itself,
    /// must let nobody begin a call.
    pub fn try_attend(&self) -> Option<Attended<'_, M>> {
        let service = match self.service.try_lock() {
            Ok(service) => service,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(Attended { served: self, service })
    }
}

/// A service that nobody else can ask anything.
pub struct Attended<'a, M: Memory> {
    served: &'a Served<M>,
    service: MutexGuard<'a, Box<dyn Service<M>>>,
}

impl<M: Memory> Attended<'_, M> {
    /// Has it answer what a caller asks who showed `key`, the store's own, and may do so much. May be called again
    /// where memory has answered *wait*, see [`Service::call`].
    pub fn call(
        &mut self,
        memory: &M,
        key: Key,
        rights: Rights,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        answer.clear();
        let Attended { served, service } = self;
        // Also of the store's own key: the store may be on its way out.
        let opened = served.key.region() == key.region() && served.key.opens(key.secret());
        let opened = if opened { memory.admits(served.key)? } else { Rights::NONE };
        if opened == Rights::NONE {
            return Ok(Err(no_store(key)));
        }
        if served.is_wide {
            return Ok(Err("a store with words of 24 and 32 bytes answers no calls: use chains".into()));
        }
        let answered = service.call(memory, Call { rights: opened.and(rights), request }, answer)?;
        assert!(answer.len() <= CALL_BYTES_MAX, "a service answered more than a call carries");
        Ok(answered)
    }

    /// The service itself.
    pub fn service(&mut self) -> &mut dyn Service<M> {
        &mut **self.service
    }
}

/// What is said to who calls a store that is not there, or by a key that is not its own.
pub(crate) fn no_store(key: Key) -> String {
    format!(
        "no store has a service numbered {} that the key of this call opens: the store was dropped, and perhaps made \
         anew; open it again",
        key.region()
    )
}
