//! ART: the adaptive radix tree in far memory, the rival that SMART is compared with. Leis, Kemper and Neumann, *The
//! Adaptive Radix Tree: ARTful Indexing for Main-Memory Databases* (ICDE 2013); Leis, Scheibner, Kemper and Neumann,
//! *The ART of Practical Synchronization* (DaMoN 2016), whose scheme ROWEX it has: readers take no locks, and writers
//! exclude each other node by node.
//!
//! Clients read and change the tree with classic verbs; the nodes' CPUs do nothing. Inner nodes have 4, 16, 48 or 256
//! slots, and are replaced by copies of another size. Leaves are never updated: each change of a key writes a new leaf
//! and CASes the slot. Leaves and nodes are spread over the members of the store.
//!
//! - `walk`: from a slot down to a leaf. `change`: put and delete. `nodes`: locks, and nodes that grow and shrink.
//! - `radix`, a folder beside this one: the bytes, scans, the cache, memory, and the sessions of clients, as SMART has
//!   them.
//! - `system`: the entry in the registry. [`mutants`]: broken variants. `counters`: numbers of events.
//!
//! | operation | waves, with a warm cache | without |
//! | --- | --- | --- |
//! | get | 1 | levels + 2 |
//! | put of a key with a value, delete | 3: read; write and mark; CAS | levels + 4 |
//! | put into a null slot | 5: read the node, lock, write, CAS, unlock | levels + 5 |
//! | the same in a full node with n slots | 5 + n / 32: also freeze, and read a cached slot again | |
//! | put with a leaf split or a path split | 3: read, write, CAS | levels + 4 |
//! | a get with a value that lies apart | one more | one more |
//!
//! A delete then reads the node once more, to see whether it should shrink. There is no read delegation and no write
//! combining.
//!
//! A lock has its owner's id. A client that waits for the lock of a client whose lease has expired fences that one and
//! frees its locks, which its records name. Nothing else has to be recovered: each change is one CAS, and a node that
//! is left frozen is replaced by the next writer.
//!
//! Invariant: an operation holds a guard of its epoch from before its first READ of a pointer until its last request
//! was answered. If a request may never be answered, the guard is kept and the client gives up.

pub mod mutants;
pub mod system;

mod change;
mod counters;
mod nodes;
mod walk;

pub use crate::index::radix::audit::{held, strays};
pub use crate::index::radix::layout::{Growth, INLINE_MAX, MEMBERS_MAX, Spec, VALUE_MAX};
pub use crate::index::radix::stat::Stat;

use crate::index::place::Damaged;
use crate::index::radix::Tree;
use crate::index::radix::drafts::{Lane, Put};
use crate::index::radix::layout::{Far, NodeType};
use crate::index::radix::read::{Met, Own};
use crate::index::radix::scan::{Progress, Scanning};
use crate::index::turns::Locals;
use crate::index::{Index, IndexError, Keys, Shape};
use crate::owned::Jobs;
use counters::Counters;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use std::cell::{Cell, RefCell};
use std::convert::Infallible;
use std::future::poll_fn;
use std::ops::Deref;
use std::pin::{Pin, pin};
use std::rc::Rc;
use std::time::Duration;
use walk::{End, Purpose};

/// Kind of the store in the catalog.
pub const KIND: &str = "art";

/// Time for which an operation tries to lock a node, unless the options have another.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which a change waits for free memory, and the pause before the second attempt. Each further pause is twice
/// as long.
const MEMORY_PATIENCE: Duration = Duration::from_millis(100);
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// Handle of a client of one store. It runs one operation at a time: give each task its own, by [`Art::another`].
pub struct Art<F> {
    client: Rc<Client<F>>,
    own: Own,
    scanning: Box<Scanning>,
    path: Vec<u8>,
}

/// Client of one store, which its handles and its task share.
struct Client<F> {
    tree: Tree<F>,
    counters: Counters,
    jobs: Jobs<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    /// Lets the lanes lock a node one after the other.
    locals: Locals<Far>,
    handles: Cell<usize>,
    swept: Cell<u64>,
    /// Time for which an operation tries to lock a node.
    patience: Duration,
}

impl<F> Deref for Client<F> {
    type Target = Tree<F>;

    fn deref(&self) -> &Tree<F> {
        &self.tree
    }
}

/// Work of a lane.
enum Job {
    Put {
        path: Vec<u8>,
        value: Vec<u8>,
        put: Put,
    },
    Delete {
        path: Vec<u8>,
    },
    /// Makes a step towards the reuse of memory.
    Reuse,
    /// Recovers all dead clients, and frees what they have left behind.
    Heal,
}

type Done = Result<bool, IndexError>;

impl<F: Fabric + Clock> Art<F> {
    fn of(client: &Rc<Client<F>>) -> Art<F> {
        client.handles.set(client.handles.get() + 1);
        Art { client: Rc::clone(client), own: Own::default(), scanning: Box::default(), path: Vec::new() }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Art<F> {
        Art::of(&self.client)
    }

    /// Recovers all dead clients: watches the leases of all ids until each was renewed, released, or has expired. Then
    /// frees the memory that dead clients have left behind. Takes about two lengths of a lease.
    ///
    /// # Errors
    /// [`IndexError`]; some dead clients may have been recovered, and some of their memory freed.
    pub async fn heal(&mut self) -> Result<(), IndexError> {
        self.client.carry_out(Job::Heal).await.map(drop)
    }

    /// Returns the shape of the tree. Reads the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub async fn stat(&mut self) -> Result<Stat, IndexError> {
        self.client.stat().await
    }

    /// Returns the shape of the tree in the form of every index. Reads the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub async fn shape(&mut self) -> Result<Shape, IndexError> {
        self.client.shape(&NodeType::COPIED).await
    }

    /// Number of units of memory that dead clients had left behind and that this one has freed.
    pub fn swept(&self) -> u64 {
        self.client.swept.get()
    }

    /// Number of dead clients that this one has recovered.
    pub fn recovered(&self) -> u64 {
        self.client.session.recovered()
    }

    /// Id of the client.
    pub fn id(&self) -> u16 {
        self.client.session.id().number()
    }

    /// Number of units of memory that this client has unlinked, and that wait until they may be reused.
    pub fn waiting_units(&self) -> usize {
        self.client.units.waiting()
    }

    fn set_path(&mut self, key: &[u8]) -> Result<(), IndexError> {
        let spec = &self.client.session.layout.spec;
        spec.keys.check(key)?;
        spec.path_of(key, &mut self.path);
        Ok(())
    }

    async fn put_with(&mut self, key: &[u8], value: &[u8], put: Put) -> Done {
        self.set_path(key)?;
        let max = self.value_max();
        if value.len() > max {
            return Err(IndexError::ValueLength { len: value.len(), max });
        }
        let (path, value) = (self.path.clone(), value.to_vec());
        self.client.carry_out(Job::Put { path, value, put }).await
    }
}

impl<F: Fabric + Clock> Index for Art<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn keys(&self) -> Keys {
        self.client.session.layout.spec.keys
    }

    fn value_max(&self) -> usize {
        self.client.session.layout.spec.value_max as usize
    }

    async fn get(&mut self, key: &[u8]) -> Result<Option<&[u8]>, IndexError> {
        self.set_path(key)?;
        let Art { client, own, path, .. } = self;
        Ok(if client.find(own, path).await? { Some(own.found()) } else { None })
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.put_with(key, value, Put::Always).await.map(drop)
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.put_with(key, value, Put::IfAbsent).await
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError> {
        self.set_path(key)?;
        self.client.carry_out(Job::Delete { path: self.path.clone() }).await
    }

    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        let Art { client, scanning, .. } = self;
        let mut progress = Progress::default();
        client.session.fetch_keys().await?;
        let _guard = client.session.epochs.enter();
        match client.scan(scanning, (from, limit), &mut progress, &mut visit).await? {
            Ok(()) => Ok(progress.visited),
            // A leaf is whole before a slot points to it, and does not change.
            Err(Met::Torn(..)) => Err(Damaged("a leaf with a wrong checksum").into()),
        }
    }

    fn keeper<'f>(&self) -> Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        let client = Rc::clone(&self.client);
        Box::pin(async move { client.keep().await })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.client.counters.all();
        all.extend(self.client.counts.all());
        all.push(("cache evictions", self.client.cache.borrow().evicted()));
        all
    }
}

impl<F> Drop for Art<F> {
    fn drop(&mut self) {
        let handles = &self.client.handles;
        handles.set(handles.get() - 1);
        if handles.get() == 0 {
            self.client.jobs.close();
        }
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Runs the client's task: carries out its jobs, renews its lease and frees its memory, until the last handle was
    /// dropped. Then gives the lease back.
    async fn keep(&self) {
        let work = async {
            let (mut jobs, mut freeing) =
                (pin!(self.jobs.serve(|lane, job| self.perform(lane, job))), pin!(self.keep_freeing()));
            poll_fn(|cx| {
                let _never_ends = freeing.as_mut().poll(cx);
                jobs.as_mut().poll(cx)
            })
            .await;
            self.drain().await;
        };
        self.session.renewing(work, || self.jobs.close()).await;
        self.session.release().await;
    }

    /// Lets a job make a step towards the reuse of memory from time to time.
    async fn keep_freeing(&self) -> Infallible {
        loop {
            self.session.fabric.sleep(self.session.layout.spec.lease() / 4).await;
            if self.units.waiting() > 0 {
                let _a_later_step_goes_on = self.jobs.carry_out(Job::Reuse).await;
            }
        }
    }

    /// Reads the leaf of a path and its value into the buffers. Returns false if the key has no value.
    async fn find(&self, own: &mut Own, path: &[u8]) -> Result<bool, IndexError> {
        let _running = self.together.enter();
        self.session.fetch_keys().await?;
        let _guard = self.session.epochs.enter();
        let mut at = self.start_together(own, path).await?;
        match self.walk(own, path, &mut at, Purpose::Read).await? {
            End::Leaf(_) => self.read_value(own).await.map(|()| true),
            _ => Ok(false),
        }
    }

    /// Hands a job to the client's task, and waits for its end.
    async fn carry_out(&self, job: Job) -> Done {
        if self.session.is_given_up() {
            return Err(IndexError::Lost);
        }
        let ran = if self.jobs.is_closed() { Ran::No } else { Ran::Unknown };
        self.jobs.carry_out(job).await.unwrap_or(Err(IndexError::NotKept { ran }))
    }

    async fn perform(&self, number: usize, job: Job) -> Done {
        let mut lane = self.lanes[number].take();
        lane.number = number as u16;
        let (until, mut pause) = (self.session.fabric.now() + MEMORY_PATIENCE, MEMORY_PAUSE);
        let done = loop {
            let done = self.attempt(&mut lane, &job).await;
            let is_patient = self.session.fabric.now() < until && !self.is_abandoned(&lane);
            if done != Err(IndexError::OutOfMemory) || !is_patient {
                break done;
            }
            // The operation has no guard now, so memory that it may have reached becomes free, too.
            self.session.fabric.sleep(pause).await;
            pause *= 2;
            let _later = self.session.epochs.advance().await;
            let _later = self.units.step(&self.session, lane.number, &self.counts).await;
        };
        self.lanes[number].replace(lane);
        let is_unknown = done.as_ref().is_err_and(|error| error.ran() != Ran::No);
        if is_unknown || self.session.is_given_up() {
            // A lock may be held, and a request may still be in flight.
            self.session.give_up();
            self.jobs.close();
        }
        done
    }

    async fn attempt(&self, lane: &mut Lane, job: &Job) -> Done {
        self.session.fetch_keys().await?;
        match job {
            Job::Put { path, value, put } => self.put(lane, path, *put, &|into| value.clone_into(into)).await,
            Job::Delete { path } => self.delete(lane, path).await,
            Job::Reuse => self.units.step(&self.session, lane.number, &self.counts).await.map(|()| true),
            Job::Heal => {
                self.session.heal(lane.number).await?;
                self.swept.set(self.swept.get() + self.sweep(lane.number).await?);
                Ok(true)
            }
        }
    }

    /// Whether the caller of the lane's operation has gone.
    fn is_abandoned(&self, lane: &Lane) -> bool {
        self.jobs.is_abandoned(lane.number.into())
    }
}
