//! The services of stores, shared by the threads of a node.
//!
//! The thread that receives a call runs the service, so a call needs no other thread. That thread is an engine for its
//! sessions, the node's thread for shm clients, or the caller's own thread for a caller in this process.
//! Invariant: a service serves one call at a time, and its lock is held only during the call.
//! Invariant: the thread that runs a call is in a turn of a session's slot, or is the node's own thread. Before the
//! node frees any part of a store, it revokes the store's key and waits until all such turns have ended.

use farside_remote::control::Store;
use farside_remote::fabric::CALL_BYTES_MAX;
use farside_remote::service::{Call, Service};
use farside_remote::{Key, Memory, Rights};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// The service of one store, with the store's key.
pub struct Served<M: Memory> {
    key: Key,
    is_wide: bool,
    service: Mutex<Box<dyn Service<M>>>,
}

impl<M: Memory> Served<M> {
    /// Creates the shared service of `store`.
    pub fn new(store: &Store, service: Box<dyn Service<M>>) -> Arc<Served<M>> {
        Arc::new(Served { key: store.extent().key, is_wide: store.wide, service: Mutex::new(service) })
    }

    /// Returns the store's key.
    pub fn key(&self) -> Key {
        self.key
    }

    /// Locks the service; waits until no call is in progress.
    pub fn lock(&self) -> ServiceGuard<'_, M> {
        let service = self.service.lock().unwrap_or_else(PoisonError::into_inner);
        ServiceGuard { served: self, service }
    }

    /// Like [`Served::lock`], but returns `None` if a call is in progress. If the caller's memory may return *wait*,
    /// the caller must hold the guard until the call has its response. Such a caller must not start a call while a step
    /// of the node waits, since a node's step locks services as well.
    pub fn try_lock(&self) -> Option<ServiceGuard<'_, M>> {
        let service = match self.service.try_lock() {
            Ok(service) => service,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        Some(ServiceGuard { served: self, service })
    }
}

/// A locked service.
pub struct ServiceGuard<'a, M: Memory> {
    served: &'a Served<M>,
    service: MutexGuard<'a, Box<dyn Service<M>>>,
}

impl<M: Memory> ServiceGuard<'_, M> {
    /// Serves a call of a caller with these rights and with `key`, which must be the store's own. May be called again
    /// after memory returned *wait*, see [`Service::call`].
    pub fn call(
        &mut self,
        memory: &M,
        key: Key,
        rights: Rights,
        request: &[u8],
        answer: &mut Vec<u8>,
    ) -> Result<Result<(), String>, M::Wait> {
        answer.clear();
        let ServiceGuard { served, service } = self;
        // Also check that the store's own key is still valid, since the store may be about to be dropped.
        let opened = served.key.region() == key.region() && served.key.opens(key.secret());
        let opened = if opened { memory.admits(served.key)? } else { Rights::NONE };
        if opened == Rights::NONE {
            return Ok(Err(no_store(key)));
        }
        if served.is_wide {
            return Ok(Err("a store with words of 24 and 32 bytes serves no calls: use chains".into()));
        }
        let answered = service.call(memory, Call { rights: opened.and(rights), request }, answer)?;
        assert!(answer.len() <= CALL_BYTES_MAX, "a service's response exceeds the size of a call");
        Ok(answered)
    }

    /// The service that is locked.
    pub fn service(&mut self) -> &mut dyn Service<M> {
        &mut **self.service
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
