//! Chequer: a hash table that clients read without the server, and that the server changes (Journal of Computer
//! Applications 40(2), 2020).
//!
//! GET takes one round trip per block of buckets, and one for the value:
//! 1. READ the block and check the CRC of the record of the key.
//! 2. If the client's cache has the value with the record's time stamp, return it.
//! 3. Otherwise READ the value and check its CRC. Keep it in the cache.
//!
//! If a CRC is wrong, GET starts again at step 1, because the value may have moved.
//!
//! PUT has two modes. Mode 1 is one call with the key and the value, which the server copies. In mode 2, for values
//! from [`Spec::put_threshold`](layout::Spec::put_threshold) on, the server copies nothing:
//! 1. Call: reserve a block. The request has the length and the CRC of the value.
//! 2. WRITE the value to the block.
//! 3. Call: commit. The server checks the CRC and installs the record.
//!
//! DELETE is one call. Every put and delete is in the store's log, if its node keeps logs.
//!
//! *Chequer-message* is what the paper compares Chequer with: the same table and pool of values, used by SEND and
//! RECEIVE alone. Each of its operations is a call, and its clients never READ or WRITE. A value that does not fit into
//! one message travels in numbered parts, all on their way at once:
//! * GET: the first part, then all others. They name the stamp of the first, so a value never has parts of two puts.
//! * PUT: reserve a block, then all parts, then commit.
//!
//! Differs from the paper (`docs/papers/chequer.md` has the reasons):
//! * The paper does not say who completes the record in mode 2. Here the client commits, and a record is never in the
//!   table before its value. So mode 2 takes three round trips, not two.
//! * A GET that reads torn bytes [`ATTEMPTS_MAX`] times calls the server. So every GET ends, however often its key is
//!   put.
//! * A key of more than 46 bytes lies in front of its value.
//! * The table and the area of values have partitions, so that engines serve puts in parallel.
//!
//! A GET is linearizable:
//! * If it finds a value: a record with a valid CRC was written by the server and was in the bucket at some instant
//!   during the READ. A value with the record's CRC, or a cached value with the record's stamp, is the value of that
//!   record. So the key had this value at that instant.
//! * If it finds no value: a key keeps its bucket while it has a value, and every bucket before that one on the path
//!   has or had a record. The GET has read these buckets in the order of the path. A key that moves to an earlier
//!   bucket was deleted in between, so it was absent at some instant during the GET.

pub mod cache;
mod calls;
pub mod layout;
pub mod log;
pub mod mutants;
pub mod pool;
pub mod request;
pub mod service;
mod system;

pub use calls::ATTEMPTS_MAX;
pub use system::{ChequerKind, ChequerMessageKind};

use super::{Fetched, Item, Kv, KvError, check_key};
use crate::members::all;
use crate::store::{self, StoreError};
use cache::Cache;
use calls::{BEHIND_PAUSE, Behind, Calls, DAMAGED, Got, Reserved, check_put};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{Addr, ChainBuf, Fabric, NodeId, Reply, Status, read, write};
use layout::{
    BLOCK_BUCKETS_MAX, Block, Bucket, LENGTH_SIZE, RECORD_SIZE, Record, Stamp, Table, Used, crc, crc_of,
    key_in_block, value_in,
};
use zerocopy::FromBytes;

/// Kind of a Chequer store in the catalog.
pub const KIND: &str = "chequer";
/// Kind of a Chequer-message store in the catalog.
pub const MESSAGE_KIND: &str = "chequer-message";

/// Largest number of bytes that one READ or WRITE of a value transfers.
pub const TRANSFER_MAX: usize = 56 << 10;
const _: () = assert!(BLOCK_BUCKETS_MAX * RECORD_SIZE <= TRANSFER_MAX as u64);
const _: () = assert!(request::PART_MAX <= TRANSFER_MAX);

/// Client of one store, of Chequer or of Chequer-message. It runs one operation at a time: give each task its own
/// client.
pub struct Chequer<F> {
    calls: Calls<F>,
    transfer: Transfer,
    chain: ChainBuf,
    reply: Reply,
    cache: Cache,
    threshold: usize,
    last: Last,
}

/// How a client transfers what it reads, and long values that it puts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Transfer {
    /// By READ and WRITE: Chequer.
    OneSided,
    /// By calls: Chequer-message.
    Message,
}

/// Where the last value lies, if not in the reply.
#[derive(Clone, Copy)]
enum Last {
    Answer,
    /// In the client's buffer, from this offset on.
    Value(usize),
    Cached(cache::Place),
}

/// Result of a search for a key.
enum Looked {
    /// The key has a value.
    Used(Used),
    /// The key has no value.
    Absent,
    /// A record was torn each time.
    Torn,
}

/// Result of reading a value.
enum Value {
    /// The value begins at this offset of the reply's output.
    InReply(usize),
    /// The value begins at this offset of the client's buffer.
    InBuffer(usize),
    /// The bytes are no value of the record: the block was replaced.
    Torn,
    /// The block has another key with the same digest.
    OfAnother,
}

impl<F: Fabric + Clock> Chequer<F> {
    /// Opens the store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open(fabric: F, node: NodeId, name: &str) -> Result<Chequer<F>, StoreError> {
        store::open::<ChequerKind, F>(fabric, node, name).await
    }

    /// Opens the Chequer-message store called `name` at `node`.
    ///
    /// # Errors
    /// The store does not exist, or it is of another kind.
    pub async fn open_message(fabric: F, node: NodeId, name: &str) -> Result<Chequer<F>, StoreError> {
        store::open::<ChequerMessageKind, F>(fabric, node, name).await
    }

    /// Creates a client from the store's description in the catalog of `node`. Sends no request.
    ///
    /// # Errors
    /// The description is invalid.
    fn of(fabric: F, node: NodeId, store: Store) -> Result<Chequer<F>, StoreError> {
        let is_message = store.kind == MESSAGE_KIND;
        let transfer = if is_message { Transfer::Message } else { Transfer::OneSided };
        let calls = Calls::of(fabric, node, store).map_err(StoreError::Gone)?;
        let threshold = calls.spec().put_threshold as usize;
        let (chain, reply, cache) = (ChainBuf::new(), Reply::new(), Cache::new(0, 0));
        Ok(Chequer { calls, transfer, chain, reply, cache, threshold, last: Last::Answer })
    }

    /// Caches values in at most this many bytes.
    #[must_use]
    pub fn with_cache(mut self, bytes: usize) -> Chequer<F> {
        self.cache = Cache::new(bytes, self.calls.spec().seed);
        self
    }

    /// Writes values of at least this many bytes in mode 2, whatever the store's own threshold is.
    #[must_use]
    pub fn with_put_threshold(mut self, bytes: usize) -> Chequer<F> {
        self.threshold = bytes;
        self
    }

    /// Returns the store's description in the catalog.
    pub fn store(&self) -> &Store {
        &self.calls.store
    }

    /// Returns the table.
    pub fn table(&self) -> &Table {
        &self.calls.table
    }

    /// Returns the fabric.
    pub fn fabric(&self) -> &F {
        &self.calls.fabric
    }
}

impl<F: Fabric + Clock> Kv for Chequer<F> {
    fn kind(&self) -> &'static str {
        match self.transfer {
            Transfer::OneSided => KIND,
            Transfer::Message => MESSAGE_KIND,
        }
    }

    /// Takes one round trip per block of buckets, and one for the value unless it is cached. In Chequer-message, takes
    /// one call, or two waves for a value of several parts.
    async fn fetch(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        check_key(key)?;
        self.clean_up().await;
        if self.transfer == Transfer::Message {
            return self.get_by_call(key).await;
        }
        for _ in 0..ATTEMPTS_MAX {
            let used = match self.look_up(key).await? {
                Looked::Used(used) => used,
                Looked::Absent => return Ok(None),
                Looked::Torn => break,
            };
            let fetched = Fetched { at: None, version: used.stamp.version() };
            if let Some(place) = self.cache.find_current(key, used.stamp.0) {
                self.last = Last::Cached(place);
                return Ok(Some(fetched));
            }
            match self.read_value(key, &used).await? {
                Value::InReply(at) => {
                    self.cache.put(key, used.stamp.0, &self.reply.output(0)[at..]);
                    return Ok(Some(Fetched { at: Some(at), ..fetched }));
                }
                Value::InBuffer(at) => {
                    self.cache.put(key, used.stamp.0, &self.calls.value[at..]);
                    self.last = Last::Value(at);
                    return Ok(Some(fetched));
                }
                Value::Torn => {}
                Value::OfAnother => break,
            }
        }
        self.get_by_call(key).await
    }

    fn item(&self, fetched: Fetched) -> Item<'_> {
        let value = match (fetched.at, self.last) {
            (Some(at), _) => self.reply.output(0).get(at..).unwrap_or_default(),
            (None, Last::Answer) => self.calls.value_in_answer(),
            (None, Last::Value(at)) => self.calls.value.get(at..).unwrap_or_default(),
            (None, Last::Cached(place)) => self.cache.value(place),
        };
        Item { value, version: fetched.version }
    }

    /// Takes one round trip per block of buckets. A key of more than 46 bytes takes as many as a GET. In
    /// Chequer-message, takes one call.
    async fn contains(&mut self, key: &[u8]) -> Result<bool, KvError> {
        check_key(key)?;
        self.clean_up().await;
        if self.transfer == Transfer::Message {
            return self.calls.contains(key).await;
        }
        if mutants::CONTAINS_BY_CACHE.is_on() && self.cache.remove(key) {
            return Ok(true);
        }
        if !key_in_block(key).is_empty() {
            return Ok(self.fetch(key).await?.is_some());
        }
        match self.look_up(key).await? {
            Looked::Used(_) => Ok(true),
            Looked::Absent => Ok(false),
            Looked::Torn => self.calls.contains(key).await,
        }
    }

    /// Takes one call in mode 1, and two calls with a WRITE in between in mode 2. In Chequer-message, takes one call,
    /// or three waves for a value of several parts.
    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        check_put(key, value)?;
        self.clean_up().await;
        let is_one_call = match self.transfer {
            Transfer::OneSided => value.len() < self.threshold,
            Transfer::Message => true,
        };
        if is_one_call && value.len() <= request::PART_MAX {
            return self.calls.put(key, value).await.map(drop);
        }
        match self.put_in_two_calls(key, value).await {
            Err(error) if mutants::COMMIT_REPEATED.is_on() && error.ran() == Ran::Unknown => {
                self.put_in_two_calls(key, value).await.map(drop)
            }
            put => put.map(drop),
        }
    }

    /// Takes one call.
    async fn delete(&mut self, key: &[u8]) -> Result<bool, KvError> {
        self.clean_up().await;
        self.calls.delete(key).await
    }
}

impl<F: Fabric + Clock> Chequer<F> {
    /// READs the blocks of buckets on the path of `key`, until one has the key or a bucket that never had a record.
    async fn look_up(&mut self, key: &[u8]) -> Result<Looked, KvError> {
        let (home, field) = (self.table().home(key), self.table().key_field(key));
        let mut attempts = ATTEMPTS_MAX;
        let mut step = 0;
        while step < self.table().probes() {
            let mut is_torn = false;
            let Chequer { calls, chain, reply, .. } = self;
            let at = (home.partition, calls.table.bucket_of(home, step));
            for record in read_block(calls, chain, reply, at).await? {
                let is_trusted = mutants::RECORD_UNCHECKED.is_on();
                match if is_trusted { record.claims() } else { record.decode() } {
                    Bucket::Never if !is_torn => return Ok(Looked::Absent),
                    Bucket::Used(used) if used.key == field => {
                        let is_inside = calls.table.contains(home.partition, used.block);
                        return if is_inside || is_trusted {
                            Ok(Looked::Used(used))
                        } else {
                            Err(KvError::Damaged(DAMAGED))
                        };
                    }
                    // It may be the record of this key. If a later bucket does not have the key, the block is read
                    // again.
                    Bucket::Torn => is_torn = true,
                    Bucket::Nonsense => return Err(KvError::Damaged(DAMAGED)),
                    Bucket::Never | Bucket::Deleted | Bucket::Used(_) => {}
                }
            }
            if !is_torn {
                step += 1;
                continue;
            }
            attempts -= 1;
            if attempts == 0 {
                return Ok(Looked::Torn);
            }
        }
        Ok(Looked::Absent)
    }

    /// READs the block of a value and checks its CRC.
    async fn read_value(&mut self, key: &[u8], used: &Used) -> Result<Value, KvError> {
        let len = used.block.len as usize;
        let mut rereads = if mutants::ONLY_VALUE_REREAD.is_on() { u32::MAX } else { 0 };
        loop {
            let bytes = if len <= TRANSFER_MAX {
                let Chequer { calls, chain, reply, .. } = self;
                let mut chain = chain.begin(calls.table.key());
                let block = chain.also(read(Addr::new(used.block.at), used.block.len));
                calls.fabric.run(calls.node, &chain, reply).await.map_err(KvError::of_read)?;
                reply.get(block).map_err(KvError::Refused)?
            } else {
                self.read_parts(used.block).await?;
                &self.calls.value[..]
            };
            if crc(bytes) != used.crc_value && !mutants::VALUE_UNCHECKED.is_on() {
                if rereads > 0 {
                    rereads -= 1;
                    continue;
                }
                return Ok(Value::Torn);
            }
            let start = LENGTH_SIZE + key_in_block(key).len();
            if value_in(bytes, key).is_none() && !mutants::VALUE_UNCHECKED.is_on() {
                return if used.key.is_long() {
                    Ok(Value::OfAnother)
                } else {
                    Err(KvError::Damaged(DAMAGED))
                };
            }
            if len <= TRANSFER_MAX {
                return Ok(Value::InReply(start));
            }
            return Ok(Value::InBuffer(start));
        }
    }

    /// READs a long block, all parts at once, into the client's buffer.
    async fn read_parts(&mut self, block: Block) -> Result<(), KvError> {
        let Calls { fabric, node, table, value, .. } = &mut self.calls;
        let (fabric, node, key) = (&*fabric, *node, table.key());
        let parts = (0..block.len).step_by(TRANSFER_MAX).map(async |offset| {
            let (mut chain, mut reply) = (ChainBuf::new(), Reply::new());
            let mut chain = chain.begin(key);
            let len = (block.len - offset).min(TRANSFER_MAX as u32);
            let part = chain.also(read(Addr::new(block.at + u64::from(offset)), len));
            fabric.run(node, &chain, &mut reply).await.map_err(KvError::of_read)?;
            match reply.get(part) {
                Ok(_) => Ok(reply),
                Err(status) => Err(KvError::Refused(status)),
            }
        });
        value.clear();
        for part in all(parts).await {
            value.extend_from_slice(part?.output(0));
        }
        Ok(())
    }

    /// Reads the value by calls to the service. It runs one call of a partition at a time, so no put interferes.
    #[cold]
    async fn get_by_call(&mut self, key: &[u8]) -> Result<Option<Fetched>, KvError> {
        let Some((got, stamp)) = self.calls.get(key).await? else { return Ok(None) };
        let value = match got {
            Got::Answer => self.calls.value_in_answer(),
            Got::Value => &self.calls.value,
        };
        // A record that a client has written may name the block of another key.
        if crc_of(key, value) != self.calls.crc_in_answer() && !mutants::VALUE_UNCHECKED.is_on() {
            return Err(KvError::Damaged(DAMAGED));
        }
        self.last = match got {
            Got::Answer => Last::Answer,
            Got::Value => Last::Value(0),
        };
        Ok(Some(Fetched { at: None, version: stamp.version() }))
    }

    /// Gives back what earlier puts have reserved whose futures were dropped, if there are any.
    #[inline]
    async fn clean_up(&mut self) {
        if self.calls.has_unfinished() {
            self.calls.withdraw_unfinished().await;
        }
    }

    /// Stores a value in mode 2, or in the parts of Chequer-message. If the log is behind, waits for it.
    async fn put_in_two_calls(&mut self, key: &[u8], value: &[u8]) -> Result<Stamp, KvError> {
        let mut behind = Behind::default();
        loop {
            let reserved = self.calls.reserve(key, value).await?;
            let put = self.put_reserved(reserved, key, value).await;
            if !matches!(&put, Err(error) if error.ran() == Ran::Unknown) {
                self.calls.forget(reserved.number);
            }
            match put {
                // The refused COMMIT has freed the block.
                Err(KvError::Fabric(error)) if behind.may_pass(&self.calls.fabric, &error) => {
                    self.calls.fabric.sleep(BEHIND_PAUSE).await;
                }
                put => return put,
            }
        }
    }

    async fn put_reserved(&mut self, reserved: Reserved, key: &[u8], value: &[u8]) -> Result<Stamp, KvError> {
        let written = match self.transfer {
            Transfer::OneSided => self.write_block(reserved, key, value).await,
            Transfer::Message => self.calls.write(reserved.number, key, value).await,
        };
        if let Err(error) = written {
            // The answers of all WRITEs have arrived, unless the session is lost. Its end frees the block then.
            if matches!(error, KvError::Refused(_)) {
                self.calls.withdraw(reserved.number).await;
            }
            return Err(error);
        }
        self.calls.commit(reserved.number).await
    }

    /// WRITEs the block of a value, all parts at once.
    async fn write_block(&mut self, to: Reserved, key: &[u8], value: &[u8]) -> Result<(), KvError> {
        let (len, key) = ((value.len() as u64).to_le_bytes(), key_in_block(key));
        let value_at = to.at + (LENGTH_SIZE + key.len()) as u64;
        let (first, rest) = value.split_at(value.len().min(TRANSFER_MAX));
        let head = [(to.at, &len[..]), (to.at + LENGTH_SIZE as u64, key), (value_at, first)];
        let Chequer { calls, chain, reply, .. } = self;
        let calls = &*calls;
        if rest.is_empty() {
            return write_pieces(calls, chain, reply, &head).await;
        }
        let ats = (value_at + first.len() as u64..).step_by(TRANSFER_MAX);
        let rest: Vec<[(u64, &[u8]); 1]> = ats.zip(rest.chunks(TRANSFER_MAX)).map(|piece| [piece]).collect();
        let parts = std::iter::once(&head[..]).chain(rest.iter().map(|pieces| &pieces[..]));
        let written = all(parts
            .map(async |pieces| write_pieces(calls, &mut ChainBuf::new(), &mut Reply::new(), pieces).await));
        // All have their answers before an error is returned, since only then the block may be given back.
        let written = written.await;
        let lost = |result: &&Result<(), KvError>| matches!(result, Err(KvError::Fabric(_)));
        match written.iter().find(lost).or_else(|| written.iter().find(|result| result.is_err())) {
            Some(error) => error.clone(),
            None => Ok(()),
        }
    }
}

/// READs a block of buckets.
async fn read_block<'r, F: Fabric>(
    calls: &Calls<F>,
    chain: &mut ChainBuf,
    reply: &'r mut Reply,
    (partition, bucket): (u64, u64),
) -> Result<&'r [Record], KvError> {
    let len = calls.table.spec().block_buckets * RECORD_SIZE;
    let mut chain = chain.begin(calls.table.key());
    let block = chain.also(read(Addr::new(calls.table.bucket_at(partition, bucket)), len as u32));
    calls.fabric.run(calls.node, &chain, reply).await.map_err(KvError::of_read)?;
    let bytes = reply.get(block).map_err(KvError::Refused)?;
    <[Record]>::ref_from_bytes(bytes).map_err(|_| KvError::Damaged(DAMAGED))
}

/// WRITEs pieces of a block, each to its address, in one chain.
async fn write_pieces<F: Fabric>(
    calls: &Calls<F>,
    chain: &mut ChainBuf,
    reply: &mut Reply,
    pieces: &[(u64, &[u8])],
) -> Result<(), KvError> {
    let mut chain = chain.begin(calls.table.key());
    for &(at, bytes) in pieces.iter().filter(|(_, bytes)| !bytes.is_empty()) {
        chain.also(write(Addr::new(at), bytes));
    }
    calls.fabric.run(calls.node, &chain, reply).await.map_err(KvError::of_read)?;
    let refused = reply.statuses().find(|&status| status != Status::Ok);
    refused.map_or(Ok(()), |status| Err(KvError::Refused(status)))
}
