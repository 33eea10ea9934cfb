//! Access control for an engine's sessions: each session's keys, and the memory that chains can access with these keys.
//!
//! A session gets keys of its own: random keys that are valid only in this session and only until it ends. Each of
//! these keys stands for the key of one store, with the rights that the session's token has to that store.
//! Invariant: a chain accesses memory only while both the session's key and the store's key are valid, so either key
//! can be revoked at any moment.

use farside_remote::arena::Geometry;
use farside_remote::control::Store;
use farside_remote::{Key, Memory, Rights, Width};
use std::collections::VecDeque;

/// The keys of one session.
#[derive(Debug, Default)]
pub struct Keys {
    held: Vec<Held>,
    /// Keys that were replaced, the latest last. Chains with these keys may still arrive.
    former: VecDeque<Held>,
}

/// Maximum number of replaced keys that are remembered. A key replaced earlier counts as never granted.
const FORMER_MAX: usize = 64;

#[derive(Debug)]
struct Held {
    own: Key,
    store: Key,
    name: String,
    rights: Rights,
    is_wide: bool,
}

impl Held {
    fn is(&self, key: Key) -> bool {
        self.own.region() == key.region() && self.own.opens(key.secret())
    }
}

impl Keys {
    /// Returns the session's key to the store. If the session has none, the new key has the secret `secret`.
    pub fn grant(&mut self, store: &Store, rights: Rights, secret: u64) -> Key {
        let (name, store, is_wide) = (store.name.clone(), store.extent().key, store.wide);
        // A held key may be for a former store in this region, or for a former table of the store: replace it.
        let is_over = |held: &mut Held| held.store.region() == store.region() && held.store != store;
        self.former.extend(self.held.extract_if(.., is_over));
        while self.former.len() > FORMER_MAX {
            self.former.pop_front();
        }
        if let Some(held) = self.held.iter_mut().find(|held| held.store == store) {
            held.rights = rights;
            return held.own;
        }
        let own = Key::new(store.region(), secret.max(1));
        self.held.push(Held { own, store, name, rights, is_wide });
        own
    }

    /// Returns a store as the session learns of it: with the session's own key, or with none if the session has no
    /// right to the store, or if the store's key is not shown. `secret` draws the secret of a new key.
    pub fn show(&mut self, store: Store, rights: Rights, secret: impl FnOnce() -> u64) -> Store {
        // A token that may create a store need not have a right to it.
        let is_opened = store.secret != 0 && rights != Rights::NONE;
        let own = is_opened.then(|| self.grant(&store, rights, secret()));
        Store { secret: own.map_or(0, Key::secret), ..store }
    }

    /// Limits each key to the `rights` of its store, given the store's name. Returns true if a key loses a right.
    pub fn limit(&mut self, rights: impl Fn(&str) -> Rights) -> bool {
        let mut is_less = false;
        for held in self.held.iter_mut().chain(&mut self.former) {
            let rights = rights(&held.name);
            is_less |= !rights.contains(held.rights);
            held.rights = rights;
        }
        is_less
    }

    /// Whether `key` is a current key of the session, or one of its last `FORMER_MAX` replaced keys. A session that
    /// uses any other key guesses, or is faulty.
    pub fn was_granted(&self, key: Key) -> bool {
        self.held.iter().chain(&self.former).any(|held| held.is(key))
    }

    /// The store's key that the session's key `key` stands for, and the rights of the session's key.
    #[inline]
    pub fn stands_for(&self, key: Key) -> Option<(Key, Rights)> {
        let held = self.held.iter().find(|held| held.own.region() == key.region())?;
        held.own.opens(key.secret()).then_some((held.store, held.rights))
    }

    /// The stores' keys that the session's keys stand for, each with the rights of the session's key.
    #[cfg(feature = "verbs")]
    pub fn held(&self) -> impl Iterator<Item = (Key, Rights)> + '_ {
        self.held.iter().map(|held| (held.store, held.rights))
    }

    /// Whether the session has the right ALLOCATE in that region, and so may retire its own buffers there.
    pub fn may_allocate(&self, region: u32) -> bool {
        self.held.iter().any(|held| held.own.region() == region && held.rights.contains(Rights::ALLOCATE))
    }

    /// Whether chains of that key's region must run on wide memory.
    #[inline]
    pub fn is_wide(&self, key: Key) -> bool {
        self.held.iter().any(|held| held.is_wide && held.own.region() == key.region())
    }
}

/// A node's memory, with access limited to the keys of one session.
pub struct Guarded<'a, M> {
    /// The node's memory.
    pub memory: &'a M,
    /// Keys through which the session sees that memory.
    pub keys: &'a Keys,
}

impl<M: Memory> Memory for Guarded<'_, M> {
    type Wait = M::Wait;

    #[inline(always)]
    fn geometry(&self) -> Geometry {
        self.memory.geometry()
    }

    #[inline]
    fn admits(&self, key: Key) -> Result<Rights, M::Wait> {
        match self.keys.stands_for(key) {
            Some((store, rights)) => Ok(self.memory.admits(store)?.and(rights)),
            None => Ok(Rights::NONE),
        }
    }

    #[inline(always)]
    fn reach(&self, region: u32, at: u64, len: u64) -> Result<u64, M::Wait> {
        self.memory.reach(region, at, len)
    }

    #[inline(always)]
    fn read(&self, at: u64, out: &mut [u8]) -> Result<(), M::Wait> {
        self.memory.read(at, out)
    }

    #[inline]
    fn write(&self, at: u64, bytes: &[u8]) -> Result<(), M::Wait> {
        self.memory.write(at, bytes)
    }

    #[inline(always)]
    fn load(&self, at: u64, width: Width) -> Result<u128, M::Wait> {
        self.memory.load(at, width)
    }

    #[inline]
    fn will_fill(&self, at: u64, len: u64) {
        self.memory.will_fill(at, len);
    }

    #[inline]
    fn is_wide(&self) -> bool {
        self.memory.is_wide()
    }

    fn exchange_wide(&self, at: u64, old: &mut [u8], new: &[u8]) -> Result<bool, M::Wait> {
        self.memory.exchange_wide(at, old, new)
    }

    #[inline]
    fn exchange(&self, at: u64, width: Width, old: u128, new: u128) -> Result<Result<(), u128>, M::Wait> {
        self.memory.exchange(at, width, old, new)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_granted_key_stands_for_one_store_and_others_for_none() {
        let mut keys = Keys::default();
        let known = |secret, wide| Store {
            name: "s".into(),
            kind: "k".into(),
            parameters: String::new(),
            quota: 0,
            incarnation: 0,
            region: 3,
            secret,
            table_at: 0,
            table_len: 0,
            wide,
            created: 0,
            id: 0,
            former: None,
            membership: None,
        };
        let store = Key::new(3, 77);
        let own = keys.grant(&known(77, false), Rights::READ, 5);
        assert_eq!(keys.stands_for(own), Some((store, Rights::READ)));
        assert_eq!(
            keys.grant(&known(77, false), Rights::ALL, 6),
            own,
            "opening a store twice returns the same key"
        );
        assert_eq!(keys.stands_for(own), Some((store, Rights::ALL)));
        for wrong in [store, Key::new(3, 0), Key::new(4, 5), Key::new(3, 6), Key::new(0, 5)] {
            assert_eq!(keys.stands_for(wrong), None);
        }
        let other = Key::new(3, 78);
        assert!(!keys.is_wide(own));
        let next = keys.grant(&known(78, true), Rights::ALL, 9);
        assert!(keys.is_wide(next) && !keys.is_wide(Key::new(4, 9)));
        assert_eq!((keys.stands_for(own), keys.stands_for(next)), (None, Some((other, Rights::ALL))));
        assert!(keys.was_granted(own) && keys.was_granted(next) && !keys.was_granted(Key::new(3, 6)));
        for secret in 79..79 + FORMER_MAX as u64 {
            keys.grant(&known(secret, false), Rights::ALL, secret);
        }
        assert!(keys.was_granted(next) && !keys.was_granted(own), "the oldest key is forgotten");
    }

    #[test]
    fn a_key_without_rights_opens_nothing_but_is_no_guess() {
        let mut keys = Keys::default();
        let store = |region, name: &str| Store {
            name: name.into(),
            kind: "k".into(),
            parameters: String::new(),
            quota: 0,
            incarnation: 0,
            region,
            secret: 77,
            table_at: 0,
            table_len: 0,
            wide: false,
            created: 0,
            id: 0,
            former: None,
            membership: None,
        };
        let [a, b] =
            [(1, "a"), (2, "b")].map(|(region, name)| keys.grant(&store(region, name), Rights::ALL, 5));
        assert!(!keys.limit(|_| Rights::ALL));
        assert!(keys.may_allocate(1) && keys.may_allocate(2) && !keys.may_allocate(3));
        assert!(keys.limit(|name| if name == "a" { Rights::READ } else { Rights::NONE }));
        assert_eq!(keys.stands_for(a), Some((Key::new(1, 77), Rights::READ)));
        assert_eq!(keys.stands_for(b), Some((Key::new(2, 77), Rights::NONE)));
        assert!(keys.was_granted(b));
        assert!(!keys.may_allocate(1) && !keys.may_allocate(2), "a scan finds what it held");
    }
}
