//! Sherman: a B+tree in far memory. Wang, Lu and Shu, *Sherman: A Write-Optimized Distributed B+Tree Index on
//! Disaggregated Memory* (SIGMOD 2022), as a rival of SMART and with the flaws repaired that were found since.
//!
//! Clients read and change the tree with READ, WRITE and CAS on words; the nodes' CPUs do nothing. Reads take no locks.
//! The nodes of the tree are spread over the members of the store, and never move.
//!
//! - `layout`: the parts of a member's table. `node`: the bytes of a node, and its versions.
//! - `walk`: from the root to a leaf. `change`: put, delete and splits. `scan`: keys in order.
//! - `cache`: copies of the nodes above the leaves. `turns`, beside this folder: locks within the client, and their
//!   handover.
//! - `session`: leases, and the locks of dead clients. `memory`: units for nodes. `heal`: what dead clients have left
//!   behind, and the tree's shape. `audit`: the same on the bytes of a store that no client uses.
//! - `system`: the entry in the registry. [`mutants`]: broken variants. `counters`: numbers of events.
//!
//! | operation | waves, with a warm cache | without |
//! | --- | --- | --- |
//! | get | 1 | levels |
//! | put, delete | 3: lock, read, write and unlock; 2 if the lock is handed over | levels + 2 |
//! | put that splits a leaf | levels + 4: the put, the walk to the node above, and its change | 2 levels + 3 |
//!
//! A split whose new node lies at another member takes one wave more. The root's pointer is known to the client. If
//! READs take so long that versions may wrap, each costs three waves: lock, read, unlock.
//!
//! Changes are jobs of the client ([`crate::owned`]): if the caller's future is dropped, the client's task ends the
//! change. Reads leave nothing behind, and those under a lock are jobs, too.

pub mod mutants;
pub mod system;

mod audit;
mod cache;
mod change;
mod counters;
mod heal;
mod layout;
mod memory;
mod node;
#[cfg(test)]
mod node_tests;
mod scan;
mod session;
mod shape;
mod walk;

pub use audit::{held, strays};
pub use heal::Stat;
pub use layout::{MEMBERS_MAX, Spec, VALUE_MAX};

use crate::index::turns::Locals;
use crate::index::{Index, IndexError, Keys};
use crate::owned::Jobs;
use cache::Cache;
use change::{Change, Lane, Put};
use counters::Counters;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use layout::{Far, LockAt, Root};
use memory::Units;
use node::{Entry, Image};
use session::Session;
use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::time::Duration;
use walk::Own;

/// Kind of the store in the catalog.
pub const KIND: &str = "sherman";

/// Time for which an operation tries to lock a node, unless the options have another.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which an operation waits for free memory, and the pause before the second attempt. Each further pause is
/// twice as long.
const MEMORY_PATIENCE: Duration = Duration::from_millis(100);
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// Handle of a client of one store. It runs one operation at a time: give each task its own, by [`Sherman::another`].
pub struct Sherman<F> {
    client: Rc<Client<F>>,
    own: Own,
}

/// Client of one store, which its handles and its task share.
struct Client<F> {
    session: Session<F>,
    units: Units,
    cache: RefCell<Cache>,
    /// The root, if the client knows it. It may be outdated.
    root: Cell<Option<Root>>,
    locals: Locals<LockAt>,
    counters: Counters,
    jobs: Jobs<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    handles: Cell<usize>,
    /// Numbers of separators and of units that `heal` has inserted and freed.
    healed: Cell<(u64, u64)>,
    /// For each member, the number of READs since the last one that was not late.
    late: Box<[Cell<u32>]>,
    /// Time for which an operation tries to lock a node.
    patience: Duration,
}

/// Work of a lane.
enum Job {
    Put {
        key: Vec<u8>,
        value: Vec<u8>,
        put: Put,
    },
    Delete {
        key: Vec<u8>,
    },
    /// Reads a node of a level under its lock.
    Read(Far, u8),
    /// Counts the tree's nodes.
    Stat,
    /// Recovers all dead clients, and completes or frees what they have left behind.
    Heal,
}

/// Output of a lane: whether the job has changed something, the node that was read, or the shape of the tree.
type Done = Result<Output, IndexError>;

#[derive(Debug)]
enum Output {
    Changed(bool),
    Node(Box<Image>),
    Shape(Box<Stat>),
}

impl<F: Fabric + Clock> Sherman<F> {
    fn of(client: &Rc<Client<F>>) -> Sherman<F> {
        client.handles.set(client.handles.get() + 1);
        Sherman { client: Rc::clone(client), own: Own::default() }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Sherman<F> {
        Sherman::of(&self.client)
    }

    /// Recovers all dead clients: watches the leases of all ids until each was renewed, released, or has expired. Then
    /// completes their splits, and frees the memory that they have left behind. Takes about the length of a lease.
    ///
    /// # Errors
    /// [`IndexError`]; a part may be done.
    pub async fn heal(&mut self) -> Result<(), IndexError> {
        self.client.carry_out(Job::Heal).await.map(drop)
    }

    /// Returns the shape of the tree. Reads the whole tree.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub async fn stat(&mut self) -> Result<Stat, IndexError> {
        match self.client.carry_out(Job::Stat).await? {
            Output::Shape(stat) => Ok(*stat),
            output => unreachable!("a walk returns a shape and not {output:?}"),
        }
    }

    /// Number of separators of dead clients that this one has inserted in [`Sherman::heal`].
    pub fn completed(&self) -> u64 {
        self.client.healed.get().0
    }

    /// Number of units of memory that dead clients had left behind and that this one has freed.
    pub fn swept(&self) -> u64 {
        self.client.healed.get().1
    }

    /// Number of dead clients that this one has recovered.
    pub fn recovered(&self) -> u64 {
        self.client.session.recovered()
    }

    /// Number of units of memory that this client has claimed and not used yet.
    pub fn spare_units(&self) -> usize {
        self.client.units.spare()
    }

    /// Id of the client.
    pub fn id(&self) -> u16 {
        self.client.session.id().number()
    }

    fn check(&self, key: &[u8]) -> Result<(), IndexError> {
        let spec = &self.client.session.layout.spec;
        spec.keys.check(key)?;
        if key.len() > spec.key_max.into() {
            return Err(IndexError::KeyLength { len: key.len(), keys: spec.keys });
        }
        Ok(())
    }

    async fn put_if(&self, key: &[u8], value: &[u8], put: Put) -> Result<bool, IndexError> {
        self.check(key)?;
        let max = self.value_max();
        if value.len() > max {
            return Err(IndexError::ValueLength { len: value.len(), max });
        }
        self.client.change_by(Job::Put { key: key.to_vec(), value: value.to_vec(), put }).await
    }
}

impl<F: Fabric + Clock> Index for Sherman<F> {
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
        self.check(key)?;
        self.client.session.fetch_keys().await?;
        let Some(index) = self.client.find(&mut self.own, key).await? else { return Ok(None) };
        match self.own.image.entry(&self.client.session.layout.form, index)? {
            Entry::Used { value, .. } => Ok(Some(value)),
            _ => unreachable!("the entry was found to have the key"),
        }
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.put_if(key, value, Put::Always).await.map(drop)
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.put_if(key, value, Put::IfAbsent).await
    }

    async fn delete(&mut self, key: &[u8]) -> Result<bool, IndexError> {
        self.check(key)?;
        self.client.change_by(Job::Delete { key: key.to_vec() }).await
    }

    async fn scan(
        &mut self,
        from: &[u8],
        limit: usize,
        visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        self.client.session.fetch_keys().await?;
        self.client.scan(&mut self.own, from, limit, visit).await
    }

    fn keeper<'f>(&self) -> std::pin::Pin<Box<dyn Future<Output = ()> + 'f>>
    where
        Self: 'f,
    {
        let client = Rc::clone(&self.client);
        Box::pin(async move { client.keep().await })
    }

    fn counters(&self) -> Vec<(&'static str, u64)> {
        let mut all = self.client.counters.all();
        all.extend([
            ("cache evictions", self.client.cache.borrow().evicted()),
            ("clients recovered", self.recovered()),
            ("splits completed", self.completed()),
            ("units swept", self.swept()),
        ]);
        all
    }
}

impl<F> Drop for Sherman<F> {
    fn drop(&mut self) {
        let handles = &self.client.handles;
        handles.set(handles.get() - 1);
        if handles.get() == 0 {
            self.client.jobs.close();
        }
    }
}

impl<F: Fabric + Clock> Client<F> {
    /// Runs the client's task: carries out its jobs and renews its lease, until the last handle was dropped. Then frees
    /// the memory that it has not used, and gives the lease back.
    async fn keep(&self) {
        let work = async {
            self.jobs.serve(|lane, job| self.perform(lane, job)).await;
            if !self.session.is_given_up() && self.session.fetch_keys().await.is_ok() {
                self.units.drain(&self.session).await;
            }
        };
        self.session.renewing(work, || self.jobs.close()).await;
        self.session.release().await;
    }

    async fn change_by(&self, job: Job) -> Result<bool, IndexError> {
        self.carry_out(job).await.map(|output| matches!(output, Output::Changed(true)))
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
        (lane.number, lane.own.lane) = (number as u16, Some(number as u16));
        let (until, mut pause) = (self.session.fabric.now() + MEMORY_PATIENCE, MEMORY_PAUSE);
        let done = loop {
            let done = match self.session.fetch_keys().await {
                Ok(()) => self.attempt(&mut lane, &job).await,
                Err(error) => Err(error),
            };
            let is_patient = self.session.fabric.now() < until && !self.jobs.is_abandoned(number);
            if !matches!(done, Err(IndexError::OutOfMemory)) || !is_patient {
                break done;
            }
            // Another client may leave, and free what it has not used.
            self.session.fabric.sleep(pause).await;
            pause *= 2;
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
        match job {
            Job::Put { key, value, put } => {
                self.change(lane, key, Change::Put(*put, value)).await.map(Output::Changed)
            }
            Job::Delete { key } => self.change(lane, key, Change::Delete).await.map(Output::Changed),
            Job::Read(at, level) => {
                self.read_under_lock(&mut lane.own, *at, *level).await?;
                Ok(Output::Node(Box::new(std::mem::take(&mut lane.own.image))))
            }
            Job::Stat => self.stat(lane.number).await.map(|stat| Output::Shape(Box::new(stat))),
            Job::Heal => self.heal(lane).await.map(|(inserted, freed)| {
                let (before, swept) = self.healed.get();
                self.healed.set((before + inserted, swept + freed));
                Output::Changed(inserted + freed > 0)
            }),
        }
    }
}
