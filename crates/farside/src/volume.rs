//! Volumes: named arrays of bytes, on several nodes at once.
//!
//! A volume is divided into blocks of one size. Each block has three replicas, or one or five, on different nodes.
//! While a majority of its replicas lives, it can be read and written, and nothing is lost. [`Pool::create_volume`]
//! creates a volume, and [`Volume::open`] opens it.
//!
//! * A block that was never written reads as zeros, and takes no memory but its entry in a table. The node reserves the
//!   memory for all blocks nevertheless, unless [`NewVolume::quota`] says less.
//! * A read or a write of one whole block is linearizable. A longer one is not: other clients may see some of its
//!   blocks written and others not.
//! * A write of a part of a block reads the block, changes it, and writes it whole. If another client writes the same
//!   block meanwhile, one of the two writes may be lost, also if they concern different bytes. Programs that share a
//!   block write it whole, or agree on turns by other means.
//!
//! # Example
//!
//! ```no_run
//! # fn main() -> Result<(), farside::Error> {
//! use farside::volume::{NewVolume, Volume};
//!
//! let pool = farside::connect("tcp://node-a,tcp://node-b,tcp://node-c")?;
//! pool.create_volume(&NewVolume::new("disk", 1 << 30))?;
//! let mut volume = Volume::open(&pool, "disk")?;
//! volume.write_at(4096, b"hello")?;
//! let mut bytes = [0; 5];
//! volume.read_at(4096, &mut bytes)?;
//! assert_eq!(&bytes, b"hello");
//! # Ok(())
//! # }
//! ```
//!
//! Invariant: a client never mixes the stores of two volumes, and never uses a volume that lacks a store.

mod manage;

pub use farside_systems::blocks::prism_rs::replace::Replaced;
#[doc(hidden)]
pub use manage::block_store;
pub use manage::{
    DroppedVolume, GroupStat, NewVolume, ReplicaMemory, ReplicaStat, VolumeInfo, VolumeStat, VolumeState,
};

use crate::endpoint::Endpoint;
use crate::error::Error;
use crate::keeper::Keepers;
use crate::pool::Pool;
use farside_fabrics::executor::{TASKS_MAX, block_on};
use farside_fabrics::timer;
use farside_remote::fabric::Ran;
pub use farside_systems::blocks::WriterIds;
use farside_systems::blocks::stripe::Shape;
use farside_systems::blocks::{Blocks, BlocksError, Stripe};
use farside_systems::members;
use farside_systems::registry::AnyBlocks;
use farside_systems::store::{Members, StoreError};
use farside_systems::system::Options;
use std::cell::{Cell, RefCell};
use std::ops::Range;
use std::rc::Rc;
use std::time::Duration;

/// Number of blocks that a client of a volume reads or writes at the same time, unless it is told otherwise.
const IN_FLIGHT: usize = 32;

/// Time that the clients of a closed volume may take to end.
const END_MAX: Duration = Duration::from_secs(1);

/// Clients of a volume's stores, for one task.
type Lane = Box<[AnyBlocks<Rc<Endpoint>>]>;

/// A client of one volume, for one thread.
///
/// Each call returns when its operation is done. Within a call, many blocks are in flight. Sessions that end between
/// two calls are opened again.
pub struct Volume {
    name: String,
    kind: String,
    size: u64,
    block: usize,
    endpoint: Rc<Endpoint>,
    /// One for each block that may be in flight. All of them are one client to the stores.
    lanes: Vec<Lane>,
    keepers: Keepers,
    in_flight: usize,
    /// Whether each store has a write of this client, which identifies the client there.
    has_written: bool,
}

/// What [`Volume::scrub`] has found so far.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Scrub {
    /// Number of blocks that were compared.
    pub blocks: u64,
    /// Number of blocks of which a replica lacked the newest write. All replicas that answered have it now.
    pub repaired: u64,
    /// Number of blocks of which two replicas hold different bytes of one write: the memory of a node is damaged. The
    /// next write of such a block repairs it.
    pub damaged: u64,
    /// Number of the first of these blocks.
    pub first_damaged: Option<u64>,
    /// Number of blocks of which a replica did not answer or has lost its memory. The others were compared.
    pub incomplete: u64,
}

impl Volume {
    /// Opens the volume called `name`.
    ///
    /// # Errors
    /// Nothing was changed. The volume does not exist, one of its stores is missing, the token has no rights to them,
    /// or the nodes cannot be reached.
    pub fn open(pool: &Pool, name: &str) -> Result<Volume, Error> {
        // Also over one node with an endpoint that opens sessions again.
        let endpoint = Rc::new(pool.endpoint_that_reopens());
        let opened = block_on(&endpoint, open_stores(&endpoint, name));
        let (head, stores) = opened.map_err(|error| pool.absent_volume(name, error))?;
        let lane: Lane = block_on(&endpoint, async {
            let mut clients = Vec::with_capacity(stores.len());
            for members in &stores {
                let entropy = getrandom::u64().expect("the system has random bytes: ids must not be guessed");
                let options = Options { entropy, ..Options::default() };
                clients.push(AnyBlocks::of(Rc::clone(&endpoint), members, &options).await?);
            }
            Ok::<_, StoreError>(clients.into())
        })?;
        let blocks: u64 = lane.iter().map(Blocks::blocks).sum();
        let (block, size) = (head.block as usize, blocks.checked_mul(head.block.into()));
        let is_even = lane.iter().all(|store| store.block_len() == block)
            && (0..).zip(&lane).all(|(index, store)| {
                let stripe = Stripe { volume: 0, index, count: lane.len() as u32 };
                store.blocks() == stripe.share(blocks)
            });
        let Some(size) = size.filter(|_| is_even) else {
            return Err(Error::Volume(format!(
                "the stores of volume '{name}' do not match: someone has damaged a node's catalog; drop the volume \
                 with 'farside volume drop {name}', and create it again"
            )));
        };
        Ok(Volume {
            name: name.to_owned(),
            kind: lane[0].kind().to_owned(),
            size,
            block,
            endpoint,
            keepers: Keepers::of(&lane),
            lanes: vec![lane],
            in_flight: IN_FLIGHT,
            has_written: false,
        })
    }

    /// Reads and writes up to this number of blocks at the same time: 1 to 64, and 32 unless it is set.
    pub fn with_in_flight(mut self, blocks: usize) -> Volume {
        self.in_flight = blocks.clamp(1, TASKS_MAX);
        self
    }

    /// Name of the volume.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Kind of the volume's stores, such as `prism-rs`.
    pub fn kind(&self) -> &str {
        &self.kind
    }

    /// Size in bytes.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Length of a block in bytes.
    pub fn block_len(&self) -> usize {
        self.block
    }

    /// Number of groups of replicas. Block `b` lies in group `b` modulo this number.
    pub fn groups(&self) -> usize {
        self.lanes[0].len()
    }

    /// Reads the bytes from `offset` on, as many as `into` has.
    ///
    /// # Errors
    /// [`Error::Volume`] if they are not all within the volume, else [`Error::Blocks`]; the contents of `into` are
    /// unspecified.
    pub fn read_at(&mut self, offset: u64, into: &mut [u8]) -> Result<(), Error> {
        self.check_range(offset, into.len() as u64)?;
        if into.is_empty() {
            return Ok(());
        }
        let (first, at) = (offset / self.block as u64, (offset % self.block as u64) as usize);
        let (head, rest) = into.split_at_mut((self.block - at).min(into.len()));
        let rest = (first + 1..).zip(rest.chunks_mut(self.block)).map(|(block, bytes)| (block, 0, bytes));
        let pieces = std::iter::once((first, at, head)).chain(rest);
        self.each(self.in_flight, 0, pieces, async |lane, (block, at, bytes)| {
            let (store, block) = place(lane, block);
            if bytes.len() == store.block_len() {
                return store.read(block, bytes).await;
            }
            let mut whole = vec![0; store.block_len()];
            store.read(block, &mut whole).await?;
            bytes.copy_from_slice(&whole[at..at + bytes.len()]);
            Ok(())
        })
        .map(drop)
    }

    /// Writes `bytes` from `offset` on. A block that is written in part is read before.
    ///
    /// # Errors
    /// [`Error::Volume`] if the bytes are not all within the volume: nothing was written. Else [`Error::Blocks`]: each
    /// block may or may not have been written if [`Error::ran`] is not [`Ran::No`].
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), Error> {
        self.check_range(offset, bytes.len() as u64)?;
        if bytes.is_empty() {
            return Ok(());
        }
        let (first, at) = (offset / self.block as u64, (offset % self.block as u64) as usize);
        let (head, rest) = bytes.split_at((self.block - at).min(bytes.len()));
        let rest = (first + 1..).zip(rest.chunks(self.block)).map(|(block, bytes)| (block, 0, bytes));
        let mut pieces = std::iter::once((first, at, head)).chain(rest);
        let write = async |lane: &mut Lane, (block, at, bytes): (u64, usize, &[u8])| {
            let (store, block) = place(lane, block);
            if bytes.len() == store.block_len() {
                return store.write(block, bytes).await;
            }
            let mut whole = vec![0; store.block_len()];
            store.read(block, &mut whole).await?;
            whole[at..at + bytes.len()].copy_from_slice(bytes);
            store.write(block, &whole).await
        };
        let mut done = 0;
        if !self.has_written {
            // Each store's first write claims the client's id there. Several at once would claim several.
            done = self.each(1, 0, pieces.by_ref().take(self.groups()), write)?;
            self.has_written = bytes.len() >= self.groups() * self.block;
        }
        self.each(self.in_flight, done, pieces, write).map(drop)
    }

    /// Returns the use of the writer ids of each group, by index; `None` if the kind of the volume does not count them.
    ///
    /// # Errors
    /// A majority of a group's replicas did not answer; nothing was changed.
    pub fn writer_ids(&mut self) -> Result<Vec<Option<WriterIds>>, Error> {
        let (endpoint, lane) = (&self.endpoint, &mut self.lanes[0]);
        block_on(endpoint, async {
            let mut groups = Vec::with_capacity(lane.len());
            for store in lane.iter_mut() {
                groups.push(store.writer_ids().await.map_err(|error| Error::Blocks { error, done: 0 })?);
            }
            Ok(groups)
        })
    }

    /// Compares all replicas of the blocks in `range`, and repairs those that are behind, while other clients use the
    /// volume. Compares at most `rate` bytes a second, if that is given. Calls `progress` after every block.
    ///
    /// # Errors
    /// [`Error::Volume`] if the range is not within the volume. Else [`Error::Blocks`]: a majority of a block's
    /// replicas did not answer; earlier blocks were compared.
    pub fn scrub(
        &mut self,
        range: Range<u64>,
        rate: Option<u64>,
        mut progress: impl FnMut(&Scrub),
    ) -> Result<Scrub, Error> {
        let blocks = self.size / self.block as u64;
        if range.start > range.end || range.end > blocks {
            return Err(Error::Volume(format!(
                "there are no blocks {} to {} in volume '{}': give a range within its {blocks} blocks",
                range.start, range.end, self.name
            )));
        }
        let (scrub, began, block_len) = (Cell::new(Scrub::default()), timer::now(), self.block as u64);
        let (start, progress) = (range.start, RefCell::new(&mut progress));
        self.each(self.in_flight, 0, range, async |lane, number| {
            if let Some(rate) = rate {
                let due = (number - start) as f64 * block_len as f64 / rate.max(1) as f64;
                let wait = (began + Duration::from_secs_f64(due)).saturating_sub(timer::now());
                if !wait.is_zero() {
                    timer::sleep(wait).await;
                }
            }
            let (store, block) = place(lane, number);
            let found = store.scrub(block).await?;
            let mut so_far = scrub.get();
            so_far.blocks += 1;
            so_far.repaired += u64::from(!found.behind.is_empty());
            so_far.incomplete += u64::from(!found.silent.is_empty());
            if !found.damaged.is_empty() {
                so_far.damaged += 1;
                so_far.first_damaged = Some(so_far.first_damaged.map_or(number, |first| first.min(number)));
            }
            scrub.set(so_far);
            (progress.borrow_mut())(&so_far);
            Ok(())
        })?;
        Ok(scrub.get())
    }

    /// Performs `operation` on each of `pieces`, on up to `in_flight` at the same time. After an error, begins no
    /// other. Returns the number of pieces that were done, and adds `before`, the number of those that the user's call
    /// has done before.
    ///
    /// # Errors
    /// [`Error::Blocks`], see [`telling`].
    fn each<P>(
        &mut self,
        in_flight: usize,
        before: u64,
        pieces: impl Iterator<Item = P>,
        operation: impl AsyncFn(&mut Lane, P) -> Result<(), BlocksError>,
    ) -> Result<u64, Error> {
        // A call with few pieces needs few lanes.
        let most = in_flight.min(TASKS_MAX - usize::from(!self.keepers.is_empty()));
        let wanted = pieces.size_hint().1.unwrap_or(most).clamp(1, most);
        while self.lanes.len() < wanted {
            let lane = self.lanes[0].iter().map(AnyBlocks::another).collect();
            self.lanes.push(lane);
        }
        let (pieces, done, failed) = (RefCell::new(pieces), Cell::new(before), RefCell::new(None));
        let tasks = self.lanes.iter_mut().take(wanted).map(|lane| {
            let (pieces, done, failed, operation) = (&pieces, &done, &failed, &operation);
            async move {
                while failed.borrow().is_none() {
                    let Some(piece) = pieces.borrow_mut().next() else { break };
                    match operation(lane, piece).await {
                        Ok(()) => done.set(done.get() + 1),
                        Err(error) => {
                            let former = failed.take();
                            *failed.borrow_mut() = Some(telling(former, error));
                        }
                    }
                }
            }
        });
        self.keepers.run_beside(&self.endpoint, tasks);
        match failed.into_inner() {
            None => Ok(done.get()),
            Some(error) => Err(Error::Blocks { error, done: done.get() }),
        }
    }

    fn check_range(&self, offset: u64, len: u64) -> Result<(), Error> {
        match offset.checked_add(len) {
            Some(end) if end <= self.size => Ok(()),
            _ => Err(Error::Volume(format!(
                "volume '{}' has {} bytes, and {len} bytes from {offset} on are not all within it: give a smaller \
                 offset or fewer bytes",
                self.name, self.size
            ))),
        }
    }
}

/// Lets the tasks of the volume's clients end.
impl Drop for Volume {
    fn drop(&mut self) {
        self.lanes.clear();
        if !self.keepers.is_empty() {
            block_on(&self.endpoint, std::mem::take(&mut self.keepers).end_within(END_MAX));
        }
    }
}

impl std::fmt::Debug for Volume {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Volume").field("name", &self.name).field("size", &self.size).finish_non_exhaustive()
    }
}

/// Returns the error of a call of which several blocks may fail: the first one, or the first one that leaves open
/// whether its block was written.
fn telling(former: Option<BlocksError>, error: BlocksError) -> BlocksError {
    match former {
        Some(former) if former.ran() != Ran::No || error.ran() == Ran::No => former,
        _ => error,
    }
}

/// Returns the store that holds a block of the volume, and the block's number there.
fn place(lane: &mut Lane, block: u64) -> (&mut AnyBlocks<Rc<Endpoint>>, u64) {
    let groups = lane.len() as u64;
    (&mut lane[(block % groups) as usize], block / groups)
}

/// Opens all stores of a volume. Returns the head's shape, and the members of each store, by index.
async fn open_stores(endpoint: &Rc<Endpoint>, name: &str) -> Result<(Shape, Vec<Members>), Error> {
    let head = members::open(endpoint, endpoint.nodes(), name).await?;
    let shape = manage::shape_of(head.store())?;
    let mut stores = vec![head];
    let Some(stripe) = shape.stripe else { return Ok((shape, stores)) };
    if stripe.index != 0 {
        return Err(Error::Volume(format!(
            "store '{name}' is one of the stores of a volume, and not a volume: list the volumes with \
             'farside volume list'"
        )));
    }
    for index in 1..stripe.count {
        let part = Stripe { index, ..stripe };
        let store = part.store_name(name);
        let missing = |reason: String| {
            Error::Volume(format!(
                "volume '{name}' lacks its store '{store}' ({reason}): a client that created or dropped the volume has \
                 not finished; drop the volume with 'farside volume drop {name}', and create it again"
            ))
        };
        let members = match members::open(endpoint, endpoint.nodes(), &store).await {
            Err(StoreError::Gone(reason)) => return Err(missing(reason)),
            opened => opened?,
        };
        if manage::shape_of(members.store())?.stripe != Some(part) {
            return Err(missing("a store of this name belongs to another volume".into()));
        }
        stores.push(members);
    }
    Ok((shape, stores))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_error_that_leaves_an_outcome_open_is_reported_before_one_that_does_not() {
        let (no, other) = (BlocksError::OutOfMemory, BlocksError::NoWriterId(7));
        let open = BlocksError::NotKept { ran: Ran::Unknown };
        let of = |errors: [&BlocksError; 3]| {
            errors.into_iter().fold(None, |former, error| Some(telling(former, error.clone())))
        };
        assert_eq!(of([&no, &other, &other]), Some(no.clone()), "the first");
        assert_eq!(of([&no, &open, &other]), Some(open.clone()));
        assert_eq!(of([&open, &no, &other]), Some(open));
    }
}
