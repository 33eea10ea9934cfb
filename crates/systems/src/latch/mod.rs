//! Objects under one-sided latches, as compared by Ziegler, Nelson-Slivon, Leis and Binnig, *Design Guidelines for
//! Correct, Efficient, and Scalable Synchronization using One-Sided RDMA* (SIGMOD 2023).
//!
//! Each object has a latch, and content that is updated in place. A [`Scheme`] says how clients take and release the
//! latch, and how they read. All requests are classic verbs: READ, WRITE, CAS and FETCH-ADD.
//!
//! - [`scheme`]: the schemes and their names. `layout`: the bytes of the objects.
//! - `exclusive` and `shared` (this file): operations that hold the latch. `optimistic`: reads without the latch.
//! - `posted`: requests that an operation does not await.
//! - `system`: the entry in the registry, and the work of the node's CPU. [`mutants`]: broken schemes.
//!
//! What each scheme relies on (section 1 of the memory contract, `farside_sim::nic`):
//!
//! | steps | awaited round trips, exclusive and shared | relies on |
//! | --- | --- | --- |
//! | basic | 4, 3 | nothing |
//! | speculative | 3, 2 | a READ follows an earlier atomic of its connection |
//! | overlapped | 2, 2 | an atomic follows an earlier WRITE of its connection |
//! | async | 1, 1 | the same, and two sets of buffers |
//! | unlatch | 1, none | the lines of a WRITE land in the order of their addresses; only the holder uses FETCH-ADD |
//!
//! A client uses one connection with the node, since verbs of different connections have no order.
//!
//! A latch has no owner. If a client dies, loses its session or drops an operation's future while it holds a latch or
//! tries to take one, the latch stays as it is, and later operations on the object fail with [`LatchError::Busy`].
//!
//! Invariant: a client sends an object's WRITE and the release only while it holds the object's latch exclusively.
//! Invariant: whether a client has taken a latch is decided by the result of its atomic, never by bytes of a READ.
//! Invariant: a buffer is reused only after the requests that use it have completed.

pub mod mutants;
pub mod scheme;
pub mod system;

mod layout;
mod optimistic;
mod posted;

pub use layout::{LEN_MAX, Latching, OBJECTS_MAX, Placement, Spec};
pub use scheme::Scheme;

use crate::system::Backoff;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::{
    Addr, Chain, ChainBuf, Fabric, FabricError, Mode, NodeId, Out, Reply, Status, cas, fetch_add, read, write,
};
use layout::{Layout, Object};
use posted::Sets;
use scheme::{Steps, Word};
use std::rc::Rc;
use std::time::Duration;
use zerocopy::little_endian::U64;

/// Kind of the store in the catalog.
pub const KIND: &str = "latch";

/// Number of attempts of an operation to take a latch, or to read an object whole.
const ATTEMPTS_MAX: u32 = 4_000;

/// Word of a latch that nobody holds.
const FREE: U64 = U64::ZERO;
/// Word of a held exclusive latch.
const HELD: U64 = U64::new(1);
/// Bit of a reader/writer latch that a writer holds.
const WRITER: u64 = 1 << 60;
const HELD_BY_WRITER: U64 = U64::new(WRITER);
/// What a reader adds to a reader/writer latch.
const READER: U64 = U64::new(1);

/// Client of one store. It runs one operation at a time: give each task its own client.
pub struct Latched<F> {
    fabric: Rc<F>,
    node: NodeId,
    layout: Layout,
    backoff: Backoff,
    draws: Draws,
    sets: Sets,
    content: Vec<u8>,
    /// Number of attempts that failed, of all operations.
    retries: u64,
}

/// Buffers of one operation.
#[derive(Default)]
struct Buffers {
    chain: ChainBuf,
    reply: Reply,
    /// Image of the object.
    image: Vec<u8>,
}

/// How an operation holds a latch.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Hold {
    Exclusive,
    Shared,
}

/// Error of an operation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum LatchError {
    /// The object was latched, or changed under each read, for too long. Nothing was changed.
    Busy,
    /// The store has no object with this number.
    NoSuchObject {
        /// The number.
        object: u64,
        /// Number of objects of the store.
        objects: u64,
    },
    /// The buffer of a read has another length than the content of an object. The field has the length of the latter.
    Length(u32),
    /// The node refused a request with this status. The latch may be held.
    Refused(Status),
    /// The fabric returned no response. The latch may be held, also if nothing was changed.
    Fabric(FabricError),
}

impl LatchError {
    /// States whether the operation with this error may have changed the object.
    pub fn ran(&self) -> Ran {
        match self {
            LatchError::Fabric(error) => error.ran(),
            _ => Ran::No,
        }
    }
}

impl From<FabricError> for LatchError {
    fn from(error: FabricError) -> LatchError {
        LatchError::Fabric(error)
    }
}

impl std::fmt::Display for LatchError {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            LatchError::Busy => f.write_str(
                "the object was latched for too long, and nothing was changed: retry; if it persists, a client may \
                 have died with the latch, so create the store anew",
            ),
            LatchError::NoSuchObject { object, objects } => {
                write!(f, "there is no object {object}: the store has {objects}")
            }
            LatchError::Length(len) => write!(f, "the buffer must have {len} bytes, as the store's objects have"),
            LatchError::Refused(status) => {
                write!(f, "the node refused the operation ({status}): open the store again")
            }
            LatchError::Fabric(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for LatchError {}

impl<F: Fabric + Clock + 'static> Latched<F> {
    /// Changes an object while no other client holds its latch. `body` gets the content, and may wait.
    ///
    /// In schemes that do not await the WRITE, this function returns once the WRITE was sent. The change counts as done
    /// only when the WRITE has completed: see [`Latched::settle`].
    ///
    /// # Errors
    /// [`LatchError`]; it may be that of an earlier operation whose requests were not awaited. After
    /// [`LatchError::Fabric`] or [`LatchError::Refused`], the latch may be held for ever.
    pub async fn with_exclusive<T>(
        &mut self,
        object: u64,
        body: impl AsyncFnOnce(&mut [u8]) -> T,
    ) -> Result<T, LatchError> {
        let object = self.object(object)?;
        let mut own = self.sets.take().await?;
        self.take_latch(&object, Hold::Exclusive, &mut own).await?;
        let mut content = std::mem::take(&mut self.content);
        self.layout.unpack(&own.image, &mut content);
        let output = body(&mut content).await;
        let unlatches = self.unlatches();
        self.layout.pack(&content, &mut own.image, !unlatches);
        self.content = content;
        match self.layout.spec.scheme.steps {
            Steps::Basic | Steps::Speculative => {
                self.write(&object, &mut own).await?;
                self.release(&object, Hold::Exclusive, &mut own).await?;
                self.sets.put_back(own);
            }
            Steps::Overlapped => {
                self.write_and_release(&object, &mut own).await?;
                self.sets.put_back(own);
            }
            Steps::Async => self.post(own, object, Last::WriteAndRelease).await,
            Steps::Unlatch if unlatches => self.post(own, object, Last::Write).await,
            Steps::Unlatch => self.post(own, object, Last::WriteAndRelease).await,
        }
        Ok(output)
    }

    /// Reads an object while no client holds its latch exclusively. `body` gets the content, and may wait. If the
    /// scheme has no shared mode, no other client can read the object by this function meanwhile.
    ///
    /// # Errors
    /// [`LatchError`], as [`Latched::with_exclusive`].
    pub async fn with_shared<T>(
        &mut self,
        object: u64,
        body: impl AsyncFnOnce(&[u8]) -> T,
    ) -> Result<T, LatchError> {
        let object = self.object(object)?;
        let mut own = self.sets.take().await?;
        self.take_latch(&object, Hold::Shared, &mut own).await?;
        let mut content = std::mem::take(&mut self.content);
        self.layout.unpack(&own.image, &mut content);
        let output = body(&content).await;
        self.content = content;
        match self.layout.spec.scheme.steps {
            Steps::Basic | Steps::Speculative | Steps::Overlapped => {
                self.release(&object, Hold::Shared, &mut own).await?;
                self.sets.put_back(own);
            }
            Steps::Async | Steps::Unlatch => self.post(own, object, Last::Release(Hold::Shared)).await,
        }
        Ok(output)
    }

    /// Reads an object's content in the way of the store's scheme: without the latch if the scheme is optimistic.
    ///
    /// # Errors
    /// [`LatchError`]. In an optimistic scheme, no latch is held after any error.
    pub async fn read(&mut self, object: u64, into: &mut [u8]) -> Result<(), LatchError> {
        if into.len() != self.layout.spec.len as usize {
            return Err(LatchError::Length(self.layout.spec.len));
        }
        if !self.layout.spec.scheme.is_optimistic() {
            return self.with_shared(object, async |content| into.copy_from_slice(content)).await;
        }
        let object = self.object(object)?;
        let mut own = self.sets.take().await?;
        self.read_optimistically(&object, &mut own).await?;
        self.layout.unpack(&own.image, &mut self.content);
        into.copy_from_slice(&self.content);
        self.sets.put_back(own);
        Ok(())
    }

    /// Waits until all requests that earlier operations have sent have completed. Call this function before the client
    /// is dropped.
    ///
    /// # Errors
    /// The first error of an earlier operation.
    pub async fn settle(&mut self) -> Result<(), LatchError> {
        self.sets.settle().await
    }

    /// Parameters of the store.
    pub fn spec(&self) -> &Spec {
        &self.layout.spec
    }

    /// Number of attempts that failed so far: to take a latch that others held, or to read an object that was changed
    /// meanwhile.
    pub fn retries(&self) -> u64 {
        self.retries
    }

    fn object(&self, number: u64) -> Result<Object, LatchError> {
        let objects = self.layout.spec.objects;
        self.layout.object(number).ok_or(LatchError::NoSuchObject { object: number, objects })
    }

    /// Kind of the latch words.
    fn word(&self) -> Word {
        match self.layout.spec.scheme {
            Scheme { steps: Steps::Unlatch, .. } if mutants::UNLATCH_UNDER_FAA.is_on() => Word::ReaderWriter,
            Scheme { word, .. } => word,
        }
    }

    /// Whether the WRITE releases the latch.
    fn unlatches(&self) -> bool {
        let is_ordered = self.layout.is_ordered() || mutants::UNLATCH_OUT_OF_ORDER.is_on();
        self.layout.spec.scheme.steps == Steps::Unlatch && is_ordered
    }

    /// Takes the latch, and reads the image into `own`.
    async fn take_latch(&mut self, object: &Object, hold: Hold, own: &mut Buffers) -> Result<(), LatchError> {
        let is_speculative = self.layout.spec.scheme.steps >= Steps::Speculative;
        let key = self.layout.table.key;
        let mut pause = self.backoff.first;
        for _ in 0..ATTEMPTS_MAX {
            let mut chain = own.chain.begin(key);
            let found = match (self.word(), hold) {
                (Word::Exclusive, _) => chain.also(cas(Mode::Eq, object.latch, &FREE, &HELD)),
                (Word::ReaderWriter, Hold::Exclusive) => {
                    chain.also(cas(Mode::Eq, object.latch, &FREE, &HELD_BY_WRITER))
                }
                (Word::ReaderWriter, Hold::Shared) => chain.also(fetch_add(object.latch, &READER)),
            };
            let image = is_speculative.then(|| chain.also(read(object.image, self.layout.image_len())));
            self.fabric.run(self.node, &chain, &mut own.reply).await?;
            let mut found = own.reply.get(found).map_err(LatchError::Refused)?.get();
            if let Some(image) = image {
                copy(&own.reply, image, &mut own.image)?;
                if mutants::READ_OVER_RESULT.is_on() {
                    found = self.layout.latch_of(&own.image).unwrap_or(found);
                }
            }
            let is_taken = match hold {
                Hold::Shared if self.word() == Word::ReaderWriter => found < WRITER,
                _ => found == FREE.get(),
            };
            if is_taken {
                return if is_speculative { Ok(()) } else { self.read_image(object, own).await };
            }
            if hold == Hold::Shared && self.word() == Word::ReaderWriter {
                self.release(object, hold, own).await?;
            }
            self.back_off(&mut pause).await;
        }
        Err(LatchError::Busy)
    }

    async fn read_image(&self, object: &Object, own: &mut Buffers) -> Result<(), LatchError> {
        let mut chain = own.chain.begin(self.layout.table.key);
        let image = chain.also(read(object.image, self.layout.image_len()));
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        copy(&own.reply, image, &mut own.image)
    }

    async fn write(&self, object: &Object, own: &mut Buffers) -> Result<(), LatchError> {
        self.send(Last::Write, object, own).await
    }

    async fn release(&self, object: &Object, hold: Hold, own: &mut Buffers) -> Result<(), LatchError> {
        self.send(Last::Release(hold), object, own).await
    }

    async fn write_and_release(&self, object: &Object, own: &mut Buffers) -> Result<(), LatchError> {
        self.send(Last::WriteAndRelease, object, own).await
    }

    async fn send(&self, last: Last, object: &Object, own: &mut Buffers) -> Result<(), LatchError> {
        last.send(&*self.fabric, self.node, &self.layout, self.word(), object, own).await
    }

    /// Sends requests that end an operation, and does not wait for them.
    async fn post(&mut self, mut own: Buffers, object: Object, last: Last) {
        let (fabric, node, layout, word) = (Rc::clone(&self.fabric), self.node, self.layout, self.word());
        let sent = async move {
            let outcome = last.send(&*fabric, node, &layout, word, &object, &mut own).await;
            (own, outcome)
        };
        self.sets.post(Box::pin(sent)).await;
    }

    /// Pauses after a failed attempt. The pause is random, below a limit that doubles with each attempt.
    async fn back_off(&mut self, pause: &mut Duration) {
        self.retries += 1;
        if *pause > Duration::ZERO {
            let pause_ns = self.draws.below(pause.as_nanos() as u64 + 1);
            self.fabric.sleep(Duration::from_nanos(pause_ns)).await;
            *pause = (*pause * 2).min(self.backoff.longest);
        }
    }
}

/// Requests that end an operation.
#[derive(Clone, Copy)]
enum Last {
    Write,
    Release(Hold),
    WriteAndRelease,
}

impl Last {
    async fn send(
        self,
        fabric: &impl Fabric,
        node: NodeId,
        layout: &Layout,
        word: Word,
        object: &Object,
        Buffers { chain, reply, image }: &mut Buffers,
    ) -> Result<(), LatchError> {
        let mut chain = chain.begin(layout.table.key);
        if let Last::Write | Last::WriteAndRelease = self {
            chain.also(write(object.image, image));
        }
        match self {
            Last::Write => {}
            Last::Release(hold) => release(&mut chain, object.latch, word, hold),
            Last::WriteAndRelease => release(&mut chain, object.latch, word, Hold::Exclusive),
        }
        fabric.run(node, &chain, reply).await?;
        match reply.verdict() {
            Status::Ok => Ok(()),
            refused => Err(LatchError::Refused(refused)),
        }
    }
}

/// Adds the op that releases a latch.
fn release(chain: &mut Chain<'_>, latch: Addr, word: Word, hold: Hold) {
    /// What the holder subtracts, as what it adds modulo 2^64.
    const EXCLUSIVE: U64 = U64::new(1u64.wrapping_neg());
    const WRITERS: U64 = U64::new(WRITER.wrapping_neg());
    const READERS: U64 = U64::new(1u64.wrapping_neg());
    match (word, hold) {
        (Word::Exclusive, _) => _ = chain.also(fetch_add(latch, &EXCLUSIVE)),
        (Word::ReaderWriter, Hold::Exclusive) if mutants::RELEASED_BY_WRITE.is_on() => {
            chain.also(write(latch, &[0; 8]));
        }
        // A reader that tries to take the latch has added to the word, and subtracts again.
        (Word::ReaderWriter, Hold::Exclusive) => _ = chain.also(fetch_add(latch, &WRITERS)),
        (Word::ReaderWriter, Hold::Shared) => _ = chain.also(fetch_add(latch, &READERS)),
    }
}

/// Copies the output of a READ.
fn copy(reply: &Reply, from: Out<[u8]>, into: &mut Vec<u8>) -> Result<(), LatchError> {
    let bytes = reply.get(from).map_err(LatchError::Refused)?;
    into.clear();
    into.extend_from_slice(bytes);
    Ok(())
}

/// Returns the objects whose latches are not free, with the latches' words, for audits of a store that no client uses.
/// `load` returns the 8-byte word at an address.
///
/// # Errors
/// The store's parameters are invalid.
pub fn held(store: &Store, load: impl Fn(u64) -> u64) -> Result<Vec<(u64, u64)>, String> {
    let layout = Layout::new(&store.parameters, store.extent())?;
    let latches = (0..layout.spec.objects).filter_map(|number| Some((number, layout.object(number)?)));
    let words = latches.map(|(number, object)| (number, load(object.latch.raw())));
    Ok(words.filter(|(_, word)| *word != FREE.get()).collect())
}
