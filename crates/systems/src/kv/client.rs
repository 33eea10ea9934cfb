//! Client of a store that it reads with one-sided READs and changes with calls ([`super::called`]).
//!
//! A GET looks for its key in the way of its system ([`LookUp`]). It looks again if it cannot trust what it has read,
//! and calls the service if that happens too often. So every GET ends, however often its key is put.
//!
//! PUT and DELETE are one call each to the node's CPU.

use super::called::{ATTEMPTS_MAX, Calls, SLOW_MAX};
use super::inplace::{Header, READ_TIME_MAX, decode};
use super::{Fetched, Item, Kv, KvError, check_key};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{Addr, ChainBuf, Fabric, Key, NodeId, Reply, read, read_as};
use std::ops::Range;
use zerocopy::{FromBytes, Immutable, KnownLayout, Unaligned};

/// What a client of a system knows of its store, and how it looks for a key there.
#[allow(async_fn_in_trait, reason = "a client belongs to one thread: no Send bound is wanted")]
pub trait LookUp {
    /// Kind of the store.
    const KIND: &'static str;
    /// What the service reports as damaged.
    const DAMAGED: &'static str;
    /// Type of the store's table.
    type Table;

    /// Returns the table.
    fn table(&self) -> &Self::Table;

    /// As [`Kv::counters`].
    fn counters(&self) -> Vec<(&'static str, u64)> {
        Vec::new()
    }

    /// Looks for a key by READs. Attempts are numbered from 0.
    ///
    /// # Errors
    /// [`KvError`]; nothing was changed.
    async fn look_up<F: Fabric + Clock>(
        &mut self,
        reads: &mut Reads<F>,
        key: &[u8],
        attempt: u32,
    ) -> Result<Look, KvError>;
}

/// Outcome of looking for a key.
#[derive(Clone, Copy, Debug)]
pub enum Look {
    /// The key has this value.
    Found(Fetched),
    /// The key has no value.
    Absent,
    /// The bytes are torn, or have changed meanwhile.
    Unsure,
    /// A READ took so long that the versions of lines may have wrapped.
    Slow,
    /// The bytes were torn in so many attempts that the service must be called.
    Torn,
}

/// Client of one store. It runs one operation at a time: give each task its own client.
pub struct Client<F, L> {
    pub(super) look_up: L,
    reads: Reads<F>,
    calls: Calls,
    store: Store,
}

/// READs of a client in its store's memory.
pub struct Reads<F> {
    pub(super) fabric: F,
    pub(super) node: NodeId,
    pub(super) key: Key,
    pub(super) chain: ChainBuf,
    pub(super) reply: Reply,
    /// Content of the object that was decoded last.
    pub(super) content: Vec<u8>,
    /// The value in `content` that was found last; `None` if it lies elsewhere.
    pub(super) value: Option<Range<usize>>,
}

impl<F, L: LookUp> Client<F, L> {
    /// Creates a client of the store that the catalog of `node` describes. A key and its value have at most `pair_max`
    /// bytes together. Sends no request.
    pub(super) fn of(fabric: F, node: NodeId, store: Store, pair_max: usize, look_up: L) -> Client<F, L> {
        let key = store.extent().key;
        let calls = Calls::new(node, key, pair_max, L::DAMAGED);
        let (chain, reply, content) = (ChainBuf::new(), Reply::new(), Vec::new());
        Client {
            look_up,
            reads: Reads { fabric, node, key, chain, reply, content, value: None },
            calls,
            store,
        }
    }

    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        &self.store
    }

    /// Returns the table.
    pub fn table(&self) -> &L::Table {
        self.look_up.table()
    }

    /// Returns the fabric.
    pub fn fabric(&self) -> &F {
        &self.reads.fabric
    }
}

impl<F: Fabric + Clock, L: LookUp> Kv for Client<F, L> {
    fn kind(&self) -> &'static str {
        L::KIND
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        self.look_up.counters()
    }

    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        let mut slow = 0;
        for attempt in 0..ATTEMPTS_MAX {
            match self.look_up.look_up(&mut self.reads, key, attempt).await? {
                Look::Found(fetched) => return Ok(Some(fetched)),
                Look::Absent => return Ok(None),
                Look::Unsure => {}
                Look::Slow => slow += 1,
                Look::Torn => break,
            }
            if slow == SLOW_MAX {
                break;
            }
        }
        self.reads.value = None;
        self.calls.get(&self.reads.fabric, key).await
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        let Fetched { at, version } = fetched;
        let Reads { reply, content, value, .. } = &self.reads;
        let value = match (at, value.clone()) {
            (Some(at), _) => reply.output(0).get(at..).unwrap_or_default(),
            (None, Some(range)) => content.get(range).unwrap_or_default(),
            (None, None) => self.calls.value(),
        };
        Item { value, version }
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        self.calls.put(&self.reads.fabric, key, value).await
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.calls.delete(&self.reads.fabric, key).await
    }
}

impl<F: Fabric + Clock> Reads<F> {
    /// READs bytes. Returns whether the READ was so short that no line's version can have wrapped.
    pub(super) async fn read_in_time(&mut self, at: u64, len: u64) -> Result<bool, KvError> {
        let begun = self.fabric.now();
        let mut chain = self.chain.begin(self.key);
        let bytes = chain.also(read(Addr::new(at), len as u32));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        self.reply.get(bytes).map_err(KvError::Refused)?;
        Ok(self.fabric.now().saturating_sub(begun) <= READ_TIME_MAX)
    }

    /// READs a value.
    pub(super) async fn read_one<T>(&mut self, at: u64) -> Result<T, KvError>
    where
        T: FromBytes + KnownLayout + Immutable + Unaligned + Copy,
    {
        let mut chain = self.chain.begin(self.key);
        let one = chain.also(read_as::<T>(Addr::new(at)));
        self.fabric.run(self.node, &chain, &mut self.reply).await.map_err(KvError::of_read)?;
        self.reply.get(one).copied().map_err(KvError::Refused)
    }

    /// Decodes the object at this offset of the bytes that were read last, whose content has this length, into
    /// `content`. Returns `None` if it is torn and `checks` is set.
    pub(super) fn decode(&mut self, offset: u64, content_len: usize, checks: bool) -> Option<Header> {
        let object = self.reply.output(0).get(offset as usize..).unwrap_or_default();
        decode(object, content_len, &mut self.content, checks)
    }
}
