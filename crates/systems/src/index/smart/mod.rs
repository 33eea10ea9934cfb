//! SMART: a radix tree in far memory. Luo, Zuo, Shen, Sun, Tao, Wang and Zhou, *SMART: A High-Performance Adaptive
//! Radix Tree for Disaggregated Memory* (OSDI 2023).
//!
//! Clients read and change the tree with classic verbs; the nodes' CPUs do nothing. Inner nodes are lock-free. Each
//! leaf ends with a lock, which the WRITE of an update releases. Leaves and nodes are spread over the members of the
//! store.
//!
//! - `walk`: from a slot down to a leaf. `change`: put and delete. `combine`: one request for concurrent operations on
//!   one key.
//! - `radix`, a folder beside this one: the bytes, scans, the cache, memory, and the sessions of clients.
//! - `system`: the entry in the registry. [`mutants`]: broken variants. `counters`: numbers of events.
//!
//! | operation | waves, with a warm cache | without |
//! | --- | --- | --- |
//! | get | 1 | levels + 2 |
//! | put of a key with a value | 3: read, lock and read, write | levels + 4 |
//! | put into a free slot | 3: read the node, write the leaf, CAS | levels + 3 |
//! | the same with a type switch | one more | |
//! | put with a leaf split or a path split | 4: read, write, CAS, reverse pointer | levels + 4 |
//! | delete | 3: read, lock and read, write and CAS | levels + 4 |
//! | a get, or an update, with a value that lies apart | one more | one more |
//!
//! Changes are jobs of the client ([`crate::owned`]): if the caller's future is dropped, the client's task ends the
//! change. Reads leave nothing behind.
//!
//! Invariant: an operation holds a guard of its epoch from before its first READ of a pointer until its last request
//! was answered. If a request may never be answered, the guard is kept and the client gives up.

pub mod mutants;
pub mod system;

mod change;
mod combine;
mod counters;
mod walk;

pub use crate::index::radix::audit::{held, strays};
pub use crate::index::radix::layout::{Growth, INLINE_MAX, MEMBERS_MAX, Spec, VALUE_MAX};
pub use crate::index::radix::stat::Stat;

use crate::index::radix::Tree;
use crate::index::radix::drafts::{Lane, Put};
use crate::index::radix::layout::NodeType;
use crate::index::radix::read::{Met, Own};
use crate::index::radix::scan::{Progress, Scanning};
use crate::index::{Combining, Index, IndexError, Keys, Shape};
use crate::owned::Jobs;
use combine::{Alone, Batch, Combine, Turn};
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
use walk::{End, Misses};

/// Kind of the store in the catalog.
pub const KIND: &str = "smart";

/// Time for which an operation tries to lock a leaf, or to read one whole, unless the options have another.
const PATIENCE: Duration = Duration::from_secs(5);
/// Time for which a put waits for free memory, and the pause before the second attempt. Each further pause is twice as
/// long.
const MEMORY_PATIENCE: Duration = Duration::from_millis(100);
const MEMORY_PAUSE: Duration = Duration::from_millis(1);

/// Handle of a client of one store. It runs one operation at a time: give each task its own, by [`Smart::another`].
pub struct Smart<F> {
    client: Rc<Client<F>>,
    own: Own,
    scanning: Box<Scanning>,
    path: Vec<u8>,
}

/// Client of one store, which its handles and its task share.
struct Client<F> {
    tree: Tree<F>,
    counters: Counters,
    combining: Combining,
    gets: Combine<Got>,
    puts: Combine<Done>,
    jobs: Jobs<Job, Done>,
    lanes: Vec<RefCell<Lane>>,
    handles: Cell<usize>,
    swept: Cell<u64>,
    /// Time for which an operation tries to lock a leaf, or to read one whole.
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
    /// A batch of puts.
    Put {
        path: Vec<u8>,
        batch: Rc<Batch<Done>>,
    },
    PutIfAbsent {
        path: Vec<u8>,
        value: Vec<u8>,
    },
    Delete {
        path: Vec<u8>,
    },
    /// Waits for the holder of a torn leaf's lock, or recovers it.
    Free(Met),
    /// Makes a step towards the reuse of memory.
    Reuse,
    /// Recovers all dead clients, and frees what they have left behind.
    Heal,
}

type Done = Result<bool, IndexError>;
/// Result of a get: the value.
type Got = Result<Option<Rc<[u8]>>, IndexError>;

impl<F: Fabric + Clock> Smart<F> {
    fn of(client: &Rc<Client<F>>) -> Smart<F> {
        client.handles.set(client.handles.get() + 1);
        Smart { client: Rc::clone(client), own: Own::default(), scanning: Box::default(), path: Vec::new() }
    }

    /// Creates another handle of the same client, for another task.
    pub fn another(&self) -> Smart<F> {
        Smart::of(&self.client)
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
        self.client.shape(&NodeType::SWITCHED).await
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

    fn check_value(&self, value: &[u8]) -> Result<(), IndexError> {
        let max = self.value_max();
        if value.len() > max { Err(IndexError::ValueLength { len: value.len(), max }) } else { Ok(()) }
    }
}

impl<F: Fabric + Clock> Index for Smart<F> {
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
        let Smart { client, own, path, .. } = self;
        let is_late = client.combining == Combining::Window || mutants::READER_JOINS_LATE.is_on();
        let alone = match client.combining {
            Combining::None => None,
            _ if is_late => return client.delegated_get(own, path, true).await,
            _ => match client.gets.alone(path) {
                Some(alone) => Some(alone),
                None => return client.delegated_get(own, path, false).await,
            },
        };
        let is_found = client.find(own, path).await;
        alone.into_iter().for_each(Alone::finish);
        Ok(if is_found? { Some(own.found()) } else { None })
    }

    async fn put(&mut self, key: &[u8], value: &[u8]) -> Result<(), IndexError> {
        self.set_path(key)?;
        self.check_value(value)?;
        self.client.combined_put(&self.path, value).await.map(drop)
    }

    async fn put_if_absent(&mut self, key: &[u8], value: &[u8]) -> Result<bool, IndexError> {
        self.set_path(key)?;
        self.check_value(value)?;
        let (path, value) = (self.path.clone(), value.to_vec());
        self.client.carry_out(Job::PutIfAbsent { path, value }).await
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
        let Smart { client, scanning, .. } = self;
        let (mut until, mut progress) = (None, Progress::default());
        loop {
            let met = {
                client.session.fetch_keys().await?;
                let _guard = client.session.epochs.enter();
                match client.scan(scanning, (from, limit), &mut progress, &mut visit).await? {
                    Ok(()) => return Ok(progress.visited),
                    Err(met) => met,
                }
            };
            // The clock is read only if the operation has to wait.
            let now = client.session.fabric.now();
            if now >= *until.get_or_insert(now + client.patience) {
                return Err(IndexError::Busy);
            }
            client.carry_out(Job::Free(met)).await?;
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

/// A job in progress. If it is dropped, nobody learns the outcome of its batch.
struct Ending<'a, F> {
    client: &'a Client<F>,
    job: &'a Job,
}

impl<F> Ending<'_, F> {
    fn end(&mut self, done: &Done) {
        if let Job::Put { path, batch } = self.job {
            self.client.puts.finish(path, batch, done.clone());
        }
    }
}

impl<F> Drop for Ending<'_, F> {
    fn drop(&mut self) {
        self.end(&Err(IndexError::NotKept { ran: Ran::Unknown }));
    }
}

impl<F> Drop for Smart<F> {
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
        let (_running, mut until) = (self.together.enter(), None);
        loop {
            let met = {
                self.session.fetch_keys().await?;
                let _guard = self.session.epochs.enter();
                let mut at = self.start_together(own, path).await?;
                match self.walk(own, path, &mut at, Misses::Verified).await? {
                    Ok(End::Leaf(_)) => return self.read_value(own).await.map(|()| true),
                    Ok(_) => return Ok(false),
                    Err(met) => met,
                }
            };
            // The clock is read only if the operation has to wait.
            let now = self.session.fabric.now();
            if now >= *until.get_or_insert(now + self.patience) {
                return Err(IndexError::Busy);
            }
            self.carry_out(Job::Free(met)).await?;
        }
    }

    /// Gets a value, together with other gets of the same key.
    async fn delegated_get<'a>(
        &self,
        own: &'a mut Own,
        path: &[u8],
        is_late: bool,
    ) -> Result<Option<&'a [u8]>, IndexError> {
        match self.gets.turn(path, &[], is_late).await {
            Turn::Done(got) => {
                self.counters.reads_delegated.add();
                let Some(value) = got? else { return Ok(None) };
                own.value.clear();
                own.value.extend_from_slice(&value);
                Ok(Some(&own.value))
            }
            Turn::Lead(leading) => {
                leading.close();
                let found = self.find(own, path).await;
                let value = || Rc::from(own.found());
                leading.finish(found.clone().map(|is_found| is_found.then(value)));
                Ok(if found? { Some(own.found()) } else { None })
            }
        }
    }

    /// Puts a value, together with other puts of the same key.
    async fn combined_put(&self, path: &[u8], value: &[u8]) -> Done {
        if self.combining == Combining::None || self.combining == Combining::Reads {
            let batch = Rc::new(Batch::of(value));
            return self.carry_out(Job::Put { path: path.to_vec(), batch }).await;
        }
        let is_late = self.combining == Combining::Window || mutants::WRITER_JOINS_LATE.is_on();
        match self.puts.turn(path, value, is_late).await {
            Turn::Done(done) => {
                self.counters.writes_combined.add();
                done
            }
            Turn::Lead(leading) => {
                let (path, batch) = (path.to_vec(), Rc::clone(leading.batch()));
                let done = self.carry_out(Job::Put { path, batch }).await;
                // If the client's task has ended, it has not ended the batch.
                leading.finish(done.clone());
                done
            }
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
        let mut ending = Ending { client: self, job: &job };
        let mut lane = self.lanes[number].take();
        lane.number = number as u16;
        let (until, mut pause) = (self.session.fabric.now() + MEMORY_PATIENCE, MEMORY_PAUSE);
        let done = loop {
            if let Err(error) = self.session.fetch_keys().await {
                break Err(error);
            }
            let done = match &job {
                Job::Put { path, batch } => {
                    batch.begin();
                    let value = |into: &mut Vec<u8>| {
                        self.puts.close(path, batch);
                        batch.value(into);
                    };
                    self.put(&mut lane, path, Put::Always, &value).await
                }
                Job::PutIfAbsent { path, value } => {
                    self.put(&mut lane, path, Put::IfAbsent, &|into| value.clone_into(into)).await
                }
                Job::Delete { path } => self.delete(&mut lane, path).await,
                Job::Free(Met::Torn(leaf, word)) => {
                    self.await_whole(lane.number, *leaf, *word).await.map(|()| true)
                }
                Job::Reuse => self.units.step(&self.session, lane.number, &self.counts).await.map(|()| true),
                Job::Heal => self.heal(lane.number).await.map(|()| true),
            };
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
        ending.end(&done);
        done
    }

    async fn heal(&self, lane: u16) -> Result<(), IndexError> {
        self.session.heal(lane).await?;
        let swept = self.sweep(lane).await?;
        self.swept.set(self.swept.get() + swept);
        Ok(())
    }

    /// Whether the caller of the lane's operation has gone.
    fn is_abandoned(&self, lane: &Lane) -> bool {
        self.jobs.is_abandoned(lane.number.into())
    }
}
