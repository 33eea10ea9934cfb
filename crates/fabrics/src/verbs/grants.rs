//! The access of an engine's clients to the node's memory by the NIC: queue pairs and registrations.
//!
//! A NIC knows no session, no key of a region and no turn. So access ends by destroying what permits it:
//!
//! - A session's queue pair is destroyed before the engine reports the session's end to the node. After that, no
//!   request of the session is executed.
//! - A region's registrations are dropped right after the region's key was revoked, before the node's next step. Grace
//!   periods begin in a later step, so no memory is taken back while the NIC reaches it.
//! - Registrations with rights that no session has any more are dropped when the rights of tokens change.
//!
//! All sessions of one token share a protection domain: they may open the same stores. Queue pairs of another domain do
//! not reach its registrations, even with the right key of the device.
//!
//! Invariant: memory is registered only while the key of its region is valid, and with the rights of the token.
//! Invariant: unless the NIC executes all atomics of the node, no registration permits atomics.

use super::error::VerbsError;
use super::request::{Extent, Pair as Asked, Response};
use super::resources::{Channel, Completions, Domain, NewPair, Pair, Registered, Way};
use super::setup::{Abilities, Here, first_packet};
use super::sys::is;
use crate::memory::Mapping;
use farside_remote::{Key, Memory, Rights};
use std::collections::BTreeMap;
use std::ffi::c_uint;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// Maximum number of pieces of a region's memory that are registered. The others are reached through the engine.
pub const EXTENTS_MAX: usize = 512;
/// Number of bytes whose pages are filled at a time.
const PREPARED_AT_ONCE: u64 = 16 << 20;

/// What permits the NIC to access the node's memory for the clients of one engine.
pub struct Grants {
    here: Arc<Here>,
    abilities: Abilities,
    completions: Arc<Completions>,
    state: Mutex<State>,
    /// Whether memory is registered.
    has_regions: AtomicBool,
}

#[derive(Default)]
struct State {
    // Dropped in this order: pairs and registrations before the memory.
    pairs: BTreeMap<u32, Pair>,
    regions: Vec<Region>,
    /// Protection domain of each token, by the token's name.
    domains: BTreeMap<String, Arc<Domain>>,
}

/// The registrations of a region for the sessions of one token.
struct Region {
    token: String,
    key: Key,
    rights: Rights,
    registered: Vec<(Extent, Registered)>,
    /// Address up to which the pages of the memory were filled.
    prepared: u64,
    memory: Arc<Mapping>,
}

impl Grants {
    pub(super) fn new(here: Arc<Here>, abilities: Abilities) -> Result<Grants, VerbsError> {
        let channel = Channel::new(&here.context)?;
        // The node's pairs send nothing and post no receives, so nothing ever completes.
        let completions = Completions::new(&channel, 1)?;
        let (state, has_regions) = (Mutex::default(), AtomicBool::new(false));
        Ok(Grants { here, abilities, completions, state, has_regions })
    }

    /// Whether the NIC executes the atomics of all regions, and engines none.
    pub fn has_nic_atomics(&self) -> bool {
        self.abilities.nic_atomics
    }

    /// Connects a queue pair for a session, in place of the session's former one. Returns the node's end.
    ///
    /// # Errors
    /// The reason why it cannot be connected.
    pub fn connect(&self, session: u32, token: &str, theirs: &Asked) -> Result<Asked, String> {
        let end = theirs.check()?;
        let mut state = self.state();
        state.pairs.remove(&session);
        let connect = |state: &mut State| {
            let domain = match state.domains.get(token) {
                Some(domain) => Arc::clone(domain),
                None => Domain::new(&self.here.context)?,
            };
            state.domains.insert(token.to_owned(), Arc::clone(&domain));
            let new = NewPair {
                sent: &self.completions,
                received: &self.completions,
                shared: None,
                sends: 1,
                receives: 1,
                inline: 0,
            };
            let way = Way { mtu: self.here.way.mtu.min(theirs.mtu), ..self.here.way };
            let first = first_packet();
            let pair = Pair::new(&domain, &new)?;
            pair.begin(&way, self.access(Rights::ALL))?;
            pair.connect(&way, first, self.here.reads, &end)?;
            Ok((pair, way.mtu, first))
        };
        let connected: Result<_, VerbsError> = connect(&mut state);
        let (pair, mtu, first) = connected.map_err(|error| error.to_string())?;
        let own = Asked::of(&self.here.end(pair.number(), first), mtu);
        state.pairs.insert(session, pair);
        Ok(own)
    }

    /// Registers the pieces `runs` of a region's memory for the sessions of a token, which has these rights to it. Each
    /// piece has an address and a length. `key` is the region's own key. Pieces that are registered already stay so.
    /// The memory must keep its pages ([`Mapping::keep_pages`]).
    ///
    /// Returns the pieces; none if the key is not valid. A call takes milliseconds: large memory is prepared by
    /// several.
    ///
    /// # Errors
    /// The memory cannot be registered: the reason.
    pub fn register(
        &self,
        token: &str,
        memory: &Arc<Mapping>,
        (key, rights): (Key, Rights),
        runs: &[(u64, u64)],
    ) -> Result<Response, String> {
        let mut state = self.state();
        // Under the lock: a revocation after this check waits in `Grants::retain`, and drops what is registered here.
        let Ok(admitted) = memory.admits(key);
        if admitted == Rights::NONE {
            return Ok(Response::Registered(Vec::new()));
        }
        let State { regions, domains, .. } = &mut *state;
        let domain = domains.get(token).ok_or("no queue pair is connected")?;
        let place =
            match regions.iter().position(|of| of.token == token && of.key == key && of.rights == rights) {
                Some(place) => place,
                None => {
                    let (token, memory, registered) = (token.to_owned(), Arc::clone(memory), Vec::new());
                    regions.push(Region { token, key, rights, registered, prepared: 0, memory });
                    regions.len() - 1
                }
            };
        self.has_regions.store(true, Ordering::Release);
        let Region { registered, prepared, .. } = &mut regions[place];
        let missing = missing(runs, registered.iter().map(|(extent, _)| (extent.at, extent.len)));
        for (at, len) in missing.into_iter().take(EXTENTS_MAX - registered.len()) {
            let from = at.max(*prepared);
            if from < at + len {
                let part = (at + len - from).min(PREPARED_AT_ONCE);
                // Filling pages takes much longer than pinning filled ones. If it fails, pinning fills them.
                let _filled_later = memory.fill_pages(from, part);
                *prepared = from + part;
                return Ok(Response::Pending);
            }
            let access = access(rights, self.abilities.nic_atomics);
            // SAFETY: the bytes are in the mapping, which `Region` holds longer than the registration. They are shared
            // with other processes, so this process accesses them atomically only. The device writes there only for
            // clients with the region's key, until the registration is dropped.
            let own = unsafe { Registered::new(domain, memory.place(at, len), len as usize, at, access) };
            let own = own.map_err(|error| error.to_string())?;
            registered.push((Extent { at, len, rkey: own.rkey() }, own));
        }
        let mut extents: Vec<Extent> = registered.iter().map(|(extent, _)| *extent).collect();
        extents.sort_by_key(|extent| extent.at);
        Ok(Response::Registered(extents))
    }

    /// Ends the access of a session. Once this returns, no request of the session is executed.
    pub fn end(&self, session: u32) {
        self.state().pairs.remove(&session);
    }

    /// Drops the registrations of regions whose keys are not valid any more. Once this returns, the NIC does not access
    /// their memory.
    pub fn retain(&self) {
        if self.has_regions.load(Ordering::Acquire) {
            let is_valid = |region: &mut Region| {
                let Ok(admitted) = region.memory.admits(region.key);
                admitted != Rights::NONE
            };
            self.state().regions.retain_mut(is_valid);
        }
    }

    /// Drops the registrations that no session needs any more, after the rights of tokens have changed. `held` has the
    /// token, the region's key and the rights of each session's keys.
    pub fn limit(&self, held: &[(String, Key, Rights)]) {
        let is_held = |region: &Region| {
            held.iter().any(|(token, key, rights)| {
                *token == region.token && *key == region.key && *rights == region.rights
            })
        };
        let mut state = self.state();
        state.regions.retain(is_held);
        state.domains.retain(|_, domain| Arc::strong_count(domain) > 1);
    }

    /// Numbers of queue pairs and of registrations now.
    pub fn count(&self) -> (usize, usize) {
        let state = self.state();
        (state.pairs.len(), state.regions.iter().map(|region| region.registered.len()).sum())
    }

    /// The device's rights for a token's rights.
    fn access(&self, rights: Rights) -> c_uint {
        access(rights, self.abilities.nic_atomics)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The device's rights for a token's rights, where the NIC executes atomics or not.
fn access(rights: Rights, nic_atomics: bool) -> c_uint {
    let right = |right: Rights, access: c_uint| if rights.contains(right) { access } else { 0 };
    let atomic = if nic_atomics { is::ACCESS_REMOTE_ATOMIC | is::ACCESS_LOCAL_WRITE } else { 0 };
    right(Rights::READ, is::ACCESS_REMOTE_READ)
        | right(Rights::WRITE, is::ACCESS_REMOTE_WRITE | is::ACCESS_LOCAL_WRITE)
        | right(Rights::ATOMIC, atomic)
}

/// Returns the parts of `runs` that `registered` does not contain. Both have addresses and lengths.
fn missing(runs: &[(u64, u64)], registered: impl Iterator<Item = (u64, u64)>) -> Vec<(u64, u64)> {
    let mut registered: Vec<(u64, u64)> = registered.collect();
    registered.sort_unstable();
    let mut missing = Vec::new();
    for &(at, len) in runs {
        let (mut from, end) = (at, at + len);
        for &(known, known_len) in &registered {
            if known + known_len <= from || known >= end {
                continue;
            }
            if known > from {
                missing.push((from, known - from));
            }
            from = (known + known_len).min(end);
        }
        if from < end {
            missing.push((from, end - from));
        }
    }
    missing
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_missing_memory_is_registered() {
        let missing = |runs: &[(u64, u64)], known: &[(u64, u64)]| missing(runs, known.iter().copied());
        assert_eq!(missing(&[(10, 5), (20, 5)], &[]), [(10, 5), (20, 5)]);
        assert_eq!(missing(&[(10, 5)], &[(10, 5)]), []);
        assert_eq!(missing(&[(10, 10)], &[(12, 2), (16, 2)]), [(10, 2), (14, 2), (18, 2)]);
        assert_eq!(missing(&[(10, 10)], &[(15, 10), (5, 6)]), [(11, 4)]);
    }

    #[test]
    fn the_device_gets_no_more_rights_than_the_token() {
        let [read, write, atomic, local] = [
            is::ACCESS_REMOTE_READ,
            is::ACCESS_REMOTE_WRITE,
            is::ACCESS_REMOTE_ATOMIC,
            is::ACCESS_LOCAL_WRITE,
        ];
        assert_eq!(access(Rights::READ, true), read);
        assert_eq!(access(Rights::READ | Rights::WRITE, false), read | write | local);
        assert_eq!(access(Rights::ALL, false), read | write | local, "the engine executes atomics");
        assert_eq!(access(Rights::ALL, true), read | write | local | atomic);
        assert_eq!(access(Rights::ALLOCATE, true), 0);
    }
}
