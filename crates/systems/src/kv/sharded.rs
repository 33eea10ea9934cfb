//! A key-value store in a pool of several nodes: each member of the store holds a part of the keys, in a store of its
//! own.
//!
//! Rendezvous hashing assigns keys to members (`rendezvous`).
//!
//! Invariant: the member of a key depends only on the key and on the incarnations of the store's members, which never
//! change. A member whose node has lost its memory is an error, never a store without keys.
//! Invariant: requests for one member do not wait for another, except those of an operation on several keys.

pub mod mutants;

use super::{Conflict, Cursor, Fetched, Item, Kv, KvError, Version};
use crate::members::{all, fetch_member};
use crate::registry::OneKv;
use crate::rendezvous::Rendezvous;
use crate::store::{Members, StoreError};
use crate::system::Options;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError, NodeId};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::rc::Rc;
use std::time::Duration;

/// Longest time that an operation waits for a new session after the session with its node has ended.
const SESSION_WAIT: Duration = Duration::from_millis(5);
/// Pause between two attempts to use the new session.
const SESSION_PAUSE: Duration = Duration::from_millis(1);

/// Client of one key-value store in a pool of several nodes. It runs one operation at a time: give each task its own
/// client.
pub struct Sharded<F: Fabric + Clock> {
    /// Never empty.
    shards: Box<[Shard<F>]>,
    places: Rendezvous,
    /// The store's description in the catalog of a member that responded.
    store: Box<Store>,
    /// Index of the shard that was read last.
    last: usize,
}

/// The part of the store that lies on one member.
struct Shard<F: Fabric + Clock> {
    fabric: F,
    members: Rc<Members>,
    index: usize,
    options: Options,
    /// The node that probably holds the member, and the number of the session in which the node granted the key of
    /// `kv`.
    node: NodeId,
    session: u64,
    /// The client of the member's part; `None` until the node has responded.
    kv: Option<OneKv<F>>,
}

impl<F: Fabric + Clock + Clone> Sharded<F> {
    /// Creates a client of the store that `members` describe. Members that did not respond are asked again by the
    /// first operation on one of their keys.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub(super) async fn of(
        fabric: F,
        members: &Members,
        options: &Options,
    ) -> Result<Sharded<F>, StoreError> {
        members.check_complete()?;
        let shared = Rc::new(members.clone());
        let mut shards = Vec::with_capacity(members.list().len());
        for (index, member) in members.list().iter().enumerate() {
            let kv = match &member.store {
                Ok(store) => {
                    let part = Members::part(member.node, member.session, store.clone());
                    Some(OneKv::of(fabric.clone(), &part, options).await?)
                }
                Err(_) => None,
            };
            let (node, session) = (member.node, member.session);
            let (fabric, members, options) = (fabric.clone(), Rc::clone(&shared), *options);
            shards.push(Shard { fabric, members, index, options, node, session, kv });
        }
        let places = match mutants::BY_ORDER.is_on() && members.store().membership.is_some() {
            true => Rendezvous::seeded(members.list().iter().map(|member| member.node.0.into())),
            false => Rendezvous::of(members),
        };
        Ok(Sharded { shards: shards.into(), places, store: Box::new(members.store().clone()), last: 0 })
    }
}

impl<F: Fabric + Clock> Sharded<F> {
    /// Returns the store's description in the catalog of one of its members.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the node that holds a key.
    pub fn node_of(&self, key: &[u8]) -> NodeId {
        self.shards[self.place_of(key)].node
    }

    /// The client of a member that has responded.
    fn responded(&self) -> &OneKv<F> {
        let responded = self.shards.iter().find_map(|shard| shard.kv.as_ref());
        responded.expect("the list of members has one with a description")
    }

    /// Index of the member to which a key belongs.
    fn place_of(&self, key: &[u8]) -> usize {
        self.places.place_of(key)
    }

    /// Indices of `keys`, grouped by shard.
    fn grouped<'k>(&self, keys: impl Iterator<Item = &'k [u8]>) -> Vec<Vec<usize>> {
        let mut groups = vec![Vec::new(); self.shards.len()];
        for (index, key) in keys.enumerate() {
            groups[self.place_of(key)].push(index);
        }
        groups
    }

    fn shard(&mut self, key: &[u8]) -> &mut Shard<F> {
        let shard = self.place_of(key);
        &mut self.shards[shard]
    }
}

impl<F: Fabric + Clock + Clone> Shard<F> {
    /// Runs an operation on the member's part of the store. If the session with the node has ended, and the operation
    /// was not carried out, tries it again over the next session, unless that session is not open soon.
    async fn run<O>(
        &mut self,
        mut operation: impl AsyncFnMut(&mut OneKv<F>) -> Result<O, KvError>,
    ) -> Result<O, KvError> {
        let mut ended = None;
        loop {
            let error = match self.client().await {
                Ok(kv) => match operation(kv).await {
                    Ok(output) => return Ok(output),
                    Err(error) => error,
                },
                Err(error) => error.into(),
            };
            let is_reopening = match &error {
                KvError::Fabric(lost @ FabricError::Lost { .. }) => {
                    ended.is_none() && (lost.ran() == Ran::No || mutants::RETRIES_UNKNOWN.is_on())
                }
                KvError::Fabric(FabricError::Unreachable { .. }) => ended.is_some(),
                KvError::Store(StoreError::Gone(_)) => return Err(self.explain(error).await),
                _ => false,
            };
            let since = *ended.get_or_insert(self.fabric.now());
            if !is_reopening || self.fabric.now().saturating_sub(since) >= SESSION_WAIT {
                return Err(error);
            }
            self.fabric.sleep(SESSION_PAUSE).await;
        }
    }

    /// Returns the client of the member's part. Creates it if this is the first operation since the node responds, or
    /// the first in a new session: a node takes many chains with keys of former sessions for guesses, and ends the
    /// session.
    async fn client(&mut self) -> Result<&mut OneKv<F>, StoreError> {
        let session = self.fabric.session_number(self.node);
        let is_other = session != self.session && !mutants::KEEPS_KEY.is_on();
        if self.kv.is_none() || is_other {
            let part = fetch_member(&self.fabric, &self.members, self.index).await?;
            self.kv = Some(OneKv::of(self.fabric.clone(), &part, &self.options).await?);
            (self.node, self.session) = (part.list()[0].node, part.list()[0].session);
        }
        Ok(self.kv.as_mut().expect("it was just created"))
    }

    /// Returns the reason why a member's part of the store is gone: the member has lost its memory, or the store was
    /// dropped.
    #[cold]
    async fn explain(&mut self, gone: KvError) -> KvError {
        match fetch_member(&self.fabric, &self.members, self.index).await {
            Err(lost @ StoreError::MemoryLost { .. }) => lost.into(),
            _ => gone,
        }
    }
}

impl<F: Fabric + Clock + Clone> Kv for Sharded<F> {
    fn shards(&self) -> usize {
        self.shards.len()
    }

    #[inline]
    fn shard_of(&self, key: &[u8]) -> usize {
        self.place_of(key)
    }

    fn kind(&self) -> &'static str {
        self.responded().kind()
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut sums = BTreeMap::new();
        let open = self.shards.iter().filter_map(|shard| shard.kv.as_ref());
        open.flat_map(Kv::counters).for_each(|(name, count)| *sums.entry(name).or_default() += count);
        sums.into_iter().collect()
    }

    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        self.last = self.place_of(key);
        let fetched = self.shards[self.last].run(async |kv: &mut OneKv<F>| kv.fetch(key).await).await;
        match fetched {
            Err(KvError::Store(StoreError::MemoryLost { .. })) if mutants::WIPED_ABSENT.is_on() => Ok(None),
            fetched => fetched,
        }
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        let kv = self.shards[self.last].kv.as_ref();
        kv.expect("the last operation was the fetch that created the client").item(fetched)
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        self.shard(key).run(async |kv: &mut OneKv<F>| kv.put(key, value).await).await
    }

    async fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.shard(key).run(async |kv: &mut OneKv<F>| kv.contains(key).await).await
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.shard(key).run(async |kv: &mut OneKv<F>| kv.delete(key).await).await
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, KvError> {
        self.shard(key).run(async |kv: &mut OneKv<F>| kv.put_if_absent(key, value).await).await
    }

    async fn compare_and_put(
        &mut self,
        key: &[u8],
        expected: Version,
        value: &[u8],
    ) -> Result<Result<Version, Conflict>, KvError> {
        self.shard(key).run(async |kv: &mut OneKv<F>| kv.compare_and_put(key, expected, value).await).await
    }

    /// Asks all members at the same time, so the keys of all members take as long as those of one.
    async fn get_many(
        &mut self,
        keys: &[&[u8]],
        visit: impl FnMut(usize, Option<Item<'_>>),
    ) -> Result<(), KvError> {
        let groups = self.grouped(keys.iter().copied());
        let visit = &RefCell::new(visit);
        let asked = self.shards.iter_mut().zip(groups).filter(|(_, group)| !group.is_empty());
        let asked = asked.map(async |(shard, group)| {
            // A second attempt reads only the keys that were not visited.
            let mut is_visited = vec![false; group.len()];
            let attempt = async |kv: &mut OneKv<F>| {
                let places: Vec<usize> = (0..group.len()).filter(|&place| !is_visited[place]).collect();
                let left: Vec<&[u8]> = places.iter().map(|&place| keys[group[place]]).collect();
                let visit = |index: usize, item: Option<Item<'_>>| {
                    is_visited[places[index]] = true;
                    visit.borrow_mut()(group[places[index]], item);
                };
                kv.get_many(&left, visit).await
            };
            shard.run(attempt).await
        });
        all(asked).await.into_iter().collect()
    }

    /// Asks all members at the same time.
    async fn put_many(&mut self, items: &[(&[u8], &[u8])]) -> Result<(), KvError> {
        let groups = self.grouped(items.iter().map(|&(key, _)| key));
        let asked = self.shards.iter_mut().zip(groups).filter(|(_, group)| !group.is_empty());
        let asked = asked.map(async |(shard, group)| {
            let of_shard: Vec<(&[u8], &[u8])> = group.iter().map(|&index| items[index]).collect();
            shard.run(async |kv: &mut OneKv<F>| kv.put_many(&of_shard).await).await
        });
        let outcomes = all(asked).await;
        let is_any_stored = outcomes
            .iter()
            .any(|outcome| outcome.as_ref().map_or_else(|error| error.ran() != Ran::No, |()| true));
        let all: Result<(), KvError> = outcomes.into_iter().collect();
        let is_reported = is_any_stored && !mutants::PARTS_FORGOTTEN.is_on();
        all.map_err(|error| if is_reported { error.of_several() } else { error })
    }

    fn first(&self) -> Result<Cursor, KvError> {
        self.responded().first()
    }

    /// Visits the keys of one member after those of another.
    async fn next(
        &mut self,
        cursor: &mut Cursor,
        mut visit: impl FnMut(&[u8], Item<'_>),
    ) -> Result<bool, KvError> {
        while let Some(shard) = self.shards.get_mut(cursor.member as usize) {
            let visited = shard.run(async |kv: &mut OneKv<F>| kv.next(cursor, &mut visit).await).await?;
            if visited {
                return Ok(true);
            }
            *cursor = Cursor::at_member(cursor.member + 1);
        }
        Ok(false)
    }
}
