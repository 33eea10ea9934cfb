//! What an engine lets a session do: the keys that it was given, and memory as its chains see it through them.
//!
//! A session's keys are its own: drawn for it, worthless to any other, gone with it. Each stands for the key of one
//! store, with the rights that its token has there. Invariant: a chain touches memory only while the session's key and
//! the store's are both good, so that either can be taken away at any moment.

use farside_remote::arena::Geometry;
use farside_remote::control::Store;
use farside_remote::{Key, Memory, Rights, Width};

/// The keys of one session.
#[derive(Debug, Default)]
pub struct Keys {
    held: Vec<Held>,
}

#[derive(Debug)]
struct Held {
    own: Key,
    store: Key,
    rights: Rights,
    is_wide: bool,
}

impl Keys {
    /// A key to the store, made of `secret`; the one that there is already, if there is one.
    pub fn grant(&mut self, store: &Store, rights: Rights, secret: u64) -> Key {
        let (store, is_wide) = (store.extent().key, store.wide);
        // A region that was another store's is this one's now.
        self.held.retain(|held| held.store.region() != store.region() || held.store == store);
        if let Some(held) = self.held.iter_mut().find(|held| held.store == store) {
            held.rights = rights;
            return held.own;
        }
        let own = Key::new(store.region(), secret.max(1));
        self.held.push(Held { own, store, rights, is_wide });
        own
    }

    /// The store's key that this one stands for, and what it opens there.
    #[inline]
    pub fn stands_for(&self, key: Key) -> Option<(Key, Rights)> {
        let held = self.held.iter().find(|held| held.own.region() == key.region())?;
        held.own.opens(key.secret()).then_some((held.store, held.rights))
    }

    /// Whether the chains of that key's region must run on memory that is wide.
    #[inline]
    pub fn is_wide(&self, key: Key) -> bool {
        self.held.iter().any(|held| held.is_wide && held.own.region() == key.region())
    }
}

/// A node's memory, as a session's chains see it.
pub struct Guarded<'a, M> {
    /// The memory.
    pub memory: &'a M,
    /// What opens it.
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
    fn a_key_stands_for_one_store_and_a_stranger_for_none() {
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
        };
        let store = Key::new(3, 77);
        let own = keys.grant(&known(77, false), Rights::READ, 5);
        assert_eq!(keys.stands_for(own), Some((store, Rights::READ)));
        assert_eq!(
            keys.grant(&known(77, false), Rights::ALL, 6),
            own,
            "a store that is opened twice has one key"
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
    }
}
