//! PRISM-RS: blocks on 2f + 1 replicas, read and written without the nodes' CPUs (PRISM, section 7). Any f replicas may
//! be dead or slow.
//!
//! Each block is a register of the algorithm ABD, in its version for several writers (Lynch and Shvartsman). A replica
//! has for each block a tag and a pointer to the block's bytes ([`layout`]). All requests of a phase go to all replicas
//! at once, and a phase ends when f + 1 of them, a majority, have carried it out.
//!
//! GET takes one or two round trips:
//! 1. Read phase: read tag and bytes. The highest tag is the newest write.
//! 2. Write phase, with the tag and the bytes that were found. It is left out if the whole majority had that tag.
//!
//! PUT takes two round trips:
//! 1. Read phase: read the tags.
//! 2. Write phase, with a tag that is higher than all tags read, and the new bytes.
//!
//! The write phase is one chain for each replica: put the tag into scratch, put the bytes into a new buffer and its
//! address behind the tag, and swing the register to both if its tag is lower. A CAS that did not swap means that the
//! replica has this write or a newer one, so it counts. An error does not count.
//!
//! Why it is linearizable:
//! * A register's tag never falls, and any two majorities share a replica. So once a write phase has ended, each later
//!   read phase finds its tag or a higher one. Therefore operations take effect in the order of their tags.
//! * A GET returns only what a majority has, by what it found or by its own write phase. So no later GET returns an
//!   older write.
//! * Tags are unique (module `writer`), so a tag stands for one content.
//! * Phases count the answers of one configuration only (module [`replace`]). If members were replaced during a phase,
//!   a read phase begins again, and a write phase repeats its write with the same tag.
//! * A request whose future was dropped or whose answer was lost may run late, and a request may run twice. Both do no
//!   harm: they change nothing unless their tag is higher.
//!
//! Writer ids are claimed at the client's first write. Each replica has a word with the highest id that was tried
//! there, and a claim is a CAS that raises this word to the id. The CAS swaps for one client at most, since the word
//! never falls. It must swap at each replica of the majority that answers first. Any two majorities share a replica, so
//! an id has one owner. A claim that fails is given up, together with its id, and a higher id is tried. So is a claim
//! that a replacement of members has interrupted. Ids never return.
//!
//! Differs from the paper (7; its text was not available, so the op sequence is a reconstruction):
//! * A PUT reads tags alone.
//! * The tag is read from the register and not from the buffer. So a null pointer can stand for zeros, and a block that
//!   was never written takes no buffer.
//! * The CAS reclaims: it retires the buffer that it replaces, or that of this chain if it did not swap. Clients report
//!   nothing to replicas, and what a dropped request does leaks no buffer.
//! * A writer has a claimed id of 24 bits, and counters of 40 bits that exceed all that it ever used for the block.
//!
//! Invariant: at each replica, the registers reach all live buffers, and no two registers reach the same buffer, except
//! while a chain runs.
//! Invariant: a write phase, once begun, has one tag and one content, also when it is repeated.
//! Invariant: only a CAS that swapped counts for a claim.

pub mod layout;
mod level;
pub mod mutants;
pub mod replace;
mod replica;
mod scrub;
pub mod service;
mod system;
mod writer;

use super::{Blocks, BlocksError, Scrubbed, WriterIds, check_access, check_number};
use crate::members::{REPLICAS_MAX, reopen};
use crate::quorum::{Outcomes, quorum};
use crate::ready::run_until_ready;
use crate::store::{Loss, Members, StoreError};
use farside_remote::arena::class::Class;
use farside_remote::clock::Clock;
use farside_remote::fabric::Ran;
use farside_remote::op::{ListId, cas_with};
use farside_remote::{Addr, Fabric, FabricError, Mode, Out, Status, allocate, cas, read, read_as, write};
use layout::{REGISTER_SIZE, Register, Spec, TAG_ALONE, Table, Tag, WHOLE, WriterId};
use replica::{Access, Failure, Replica};
use service::PrismRsKind;
use std::cell::{Cell, RefCell};
use std::pin::pin;
use std::rc::Rc;
use std::task::Poll;
use writer::Writer;
use zerocopy::IntoBytes;
use zerocopy::big_endian;

/// Kind of the store in the catalog.
pub const KIND: &str = "prism-rs";

/// Scratch address of a register, which a chain reads or builds: the tag, and the address behind it.
const REGISTER: Addr = Addr::scratch(0);
const REGISTER_AT: Addr = Addr::scratch(8);
/// Offset of the address in a register.
const AT_OFFSET: u32 = 8;

/// Client of one store. It runs one operation at a time: give each task its own, by [`PrismRs::another`].
pub struct PrismRs<F> {
    fabric: F,
    spec: Spec,
    /// Free list of the blocks' buffers.
    list: ListId,
    replicas: Box<[Replica]>,
    /// Number of the configuration that `replicas` are.
    configuration: u64,
    /// Whether a replica of a phase has found that this configuration is over.
    is_over: Cell<bool>,
    shared: Rc<Shared>,
}

/// What all tasks of a client share.
struct Shared {
    writer: Writer,
    /// The members of the newest configuration that a task has opened.
    newest: RefCell<Rc<Members>>,
}

/// What one replica has of a block: its tag, and the place of its bytes in the reply, unless they are zeros.
#[derive(Clone, Copy)]
struct Found {
    tag: Tag,
    bytes: Option<Out<[u8]>>,
}

impl<F: Fabric + Clock> Blocks for PrismRs<F> {
    fn kind(&self) -> &'static str {
        KIND
    }

    fn block_len(&self) -> usize {
        self.spec.block as usize
    }

    fn blocks(&self) -> u64 {
        self.spec.blocks
    }

    async fn read(&mut self, block: u64, into: &mut [u8]) -> Result<(), BlocksError> {
        check_access(self, block, into.len())?;
        let (newest, is_at_majority) = loop {
            match self.read_phase(block, into).await {
                Err(error) if self.has_moved(&error).await? => {}
                read => break read?,
            }
        };
        if is_at_majority || mutants::NO_WRITE_BACK.is_on() {
            return Ok(());
        }
        self.write_phase(block, newest, into).await.map_err(|error| with_ran(error, Ran::No))
    }

    async fn write(&mut self, block: u64, bytes: &[u8]) -> Result<(), BlocksError> {
        check_access(self, block, bytes.len())?;
        let id = self.writer_id().await?;
        let newest = loop {
            match self.tag_phase(block).await {
                Err(error) if self.has_moved(&error).await? => {}
                newest => break newest?,
            }
        };
        let tag = self.shared.writer.next_tag(id, block, newest)?;
        self.write_phase(block, tag, bytes).await
    }

    async fn writer_ids(&mut self) -> Result<Option<WriterIds>, BlocksError> {
        let of = self.spec.writers;
        loop {
            match self.highest_id().await {
                Err(error) if self.has_moved(&error).await? => {}
                highest => {
                    let claimed = highest?.min(of.into()) as u32;
                    return Ok(Some(WriterIds { claimed, of }));
                }
            }
        }
    }

    async fn scrub(&mut self, block: u64) -> Result<Scrubbed, BlocksError> {
        check_number(self, block)?;
        self.compare(block).await
    }
}

impl<F: Fabric + Clock> PrismRs<F> {
    /// Read phase of a GET: reads the newest write that a majority knows of into `into`. Returns its tag, and whether
    /// every replica of the majority has this write.
    async fn read_phase(&mut self, block: u64, into: &mut [u8]) -> Result<(Tag, bool), BlocksError> {
        let (fabric, needed) = (&self.fabric, self.majority());
        let found = at_majority(&mut self.replicas, needed, &self.is_over, |replica| {
            replica.run(fabric, async |access| read_block(fabric, access, block).await)
        });
        let found = found.await.map_err(|found| no_majority(found, needed))?;
        let found = || {
            found
                .iter()
                .enumerate()
                .filter_map(|(index, found)| Some((index, found.as_ref()?.as_ref().ok()?)))
        };
        let (index, &Found { tag, bytes }) =
            found().max_by_key(|(_, found)| found.tag).expect("a majority has answered");
        match bytes {
            Some(bytes) => {
                into.copy_from_slice(self.replicas[index].reply.get(bytes).map_err(BlocksError::Refused)?)
            }
            None => into.fill(0),
        }
        Ok((tag, found().filter(|(_, found)| found.tag == tag).count() >= needed))
    }

    /// Read phase of a PUT: returns the highest tag that a majority has.
    async fn tag_phase(&mut self, block: u64) -> Result<Tag, BlocksError> {
        let (fabric, needed) = (&self.fabric, self.majority());
        let tags = at_majority(&mut self.replicas, needed, &self.is_over, |replica| {
            replica.run(fabric, async |access| read_tag(fabric, access, block).await)
        });
        let tags = tags.await.map_err(|tags| no_majority(tags, needed))?;
        Ok(tags.into_iter().flatten().flatten().max().expect("a majority has answered"))
    }

    /// Write phase: makes a majority of one configuration have this write or a newer one.
    async fn write_phase(&mut self, block: u64, tag: Tag, bytes: &[u8]) -> Result<(), BlocksError> {
        let (mut may_have_run, before) = (false, Cell::new(0));
        loop {
            let (fabric, needed, list, of) = (&self.fabric, self.majority(), self.list, self.replicas.len());
            let counted = if mutants::CONFIGURATIONS_MIXED.is_on() { before.get() } else { 0 };
            let acks =
                at_majority(&mut self.replicas, needed.saturating_sub(counted), &self.is_over, |replica| {
                    let ack = replica
                        .run(fabric, async |access| install(fabric, access, list, block, &tag, bytes).await);
                    async { counted_ack(ack.await, &before) }
                });
            let Err(acks) = acks.await else { return Ok(()) };
            let has_not_run =
                |ack: &Result<(), Failure>| ack.as_ref().is_err_and(|failure| failure.ran == Ran::No);
            may_have_run |= acks.iter().flatten().filter(|ack| has_not_run(ack)).count() != of;
            let ran = if may_have_run { Ran::Unknown } else { Ran::No };
            let error = with_ran(no_majority(acks, needed), ran);
            if !self.has_moved(&error).await.map_err(|error| with_ran(error, ran))? {
                return Err(error);
            }
        }
    }

    /// Returns this client's writer id. Claims one if the client has none.
    async fn writer_id(&mut self) -> Result<WriterId, BlocksError> {
        if let Some(id) = self.shared.writer.id() {
            return Ok(id);
        }
        let (mut tried, writers) = (0, self.spec.writers);
        loop {
            match self.claim_above(&mut tried).await {
                Ok(Some(id)) => return Ok(self.shared.writer.adopt(id)),
                Ok(None) => return Err(BlocksError::NoWriterId(writers)),
                // The id that was tried is given up.
                Err(error) if self.has_moved(&error).await? => {}
                Err(error) => return Err(error),
            }
        }
    }

    /// Claims a writer id that is greater than `tried`, which becomes the highest one that was tried. Returns `None` if
    /// none is left.
    async fn claim_above(&mut self, tried: &mut u64) -> Result<Option<WriterId>, BlocksError> {
        let mut highest = self.highest_id().await?;
        let (fabric, needed) = (&self.fabric, self.majority());
        loop {
            let number = highest.max(*tried).saturating_add(1);
            let Some(id) = WriterId::new(number).filter(|id| id.number() <= self.spec.writers) else {
                return Ok(None);
            };
            *tried = number;
            let found = at_majority(&mut self.replicas, needed, &self.is_over, |replica| {
                replica.run(fabric, async |access| claim(fabric, access, number).await)
            });
            let found = found.await.map_err(|found| no_majority(found, needed))?;
            highest = found.into_iter().flatten().flatten().max().expect("a majority has answered");
            if highest < number || mutants::TAG_REUSED.is_on() {
                return Ok(Some(id));
            }
            // Another client has tried this id or a higher one, or an attempt of this client, whose answer was lost,
            // has tried this one. Further answers could show a majority for this client, but a dead replica would
            // delay the next attempt.
        }
    }

    /// Returns the highest writer id that a majority knows to be tried.
    async fn highest_id(&mut self) -> Result<u64, BlocksError> {
        let (fabric, needed) = (&self.fabric, self.majority());
        let highest = at_majority(&mut self.replicas, needed, &self.is_over, |replica| {
            replica.run(fabric, async |access| read_highest_id(fabric, access).await)
        });
        let highest = highest.await.map_err(|highest| no_majority(highest, needed))?;
        Ok(highest.into_iter().flatten().flatten().max().expect("a majority has answered"))
    }

    /// Whether a phase has failed with `error` since this configuration is over. If so, opens the store in the next
    /// one: the phase must begin again.
    ///
    /// Replicas that have lost their memory were seen at different times. Each may have been replaced before the next
    /// one lost its memory, even if no replica has told so. So a majority counts as lost only if no next configuration
    /// is found.
    ///
    /// # Errors
    /// Too few members of the next configuration answer, for a while.
    async fn has_moved(&mut self, error: &BlocksError) -> Result<bool, BlocksError> {
        let is_over = self.is_over.take();
        let may_be_over = is_majority_lost(error);
        if !is_over && !may_be_over {
            return Ok(false);
        }
        let needed = self.majority();
        match self.moved().await {
            Err(_) if !is_over => Ok(false),
            moved => moved.map_err(|error| failed_to_move(error.into(), needed)),
        }
    }

    /// Opens the store in the next configuration, since this one is over. Returns false if that is not certain.
    ///
    /// # Errors
    /// Those of [`PrismRs::has_moved`].
    async fn moved(&mut self) -> Result<bool, StoreError> {
        let mut known = Rc::clone(&self.shared.newest.borrow());
        let (until, mut pause) = (self.fabric.now() + replica::PATIENCE, replica::PAUSE);
        while known.configuration() <= self.configuration {
            match Box::pin(reopen(&self.fabric, &known)).await {
                Ok(Some(opened)) => {
                    known = Rc::new(opened);
                    let mut newest = self.shared.newest.borrow_mut();
                    // Another task may have opened the store meanwhile.
                    if known.configuration() > newest.configuration() {
                        *newest = Rc::clone(&known);
                    }
                }
                // The members that serve the next configuration did not answer this time, or members were replaced once
                // more.
                Ok(None) | Err(_) if self.fabric.now() < until && !mutants::GIVES_UP_AT_ONCE.is_on() => {
                    self.fabric.sleep(pause).await;
                    pause = (pause * 2).min(replica::PAUSE_MAX);
                }
                Ok(None) => return Ok(false),
                Err(error) => return Err(error),
            }
        }
        let replica = |index| Replica::new(&self.fabric, &known, index);
        self.replicas = (0..known.list().len()).map(replica).collect::<Result<Box<[_]>, _>>()?;
        self.configuration = known.configuration();
        Ok(true)
    }

    fn majority(&self) -> usize {
        let f = self.replicas.len() / 2;
        if mutants::MINORITY_QUORUM.is_on() { f.max(1) } else { f + 1 }
    }
}

/// Reads a block's register and the bytes to which it points. Both are of the same write: a buffer is not reused while
/// a chain runs that may reach it.
async fn read_block<F: Fabric>(fabric: &F, access: Access<'_>, block: u64) -> Result<Found, BlocksError> {
    let Access { node, table, chain, reply } = access;
    let mut chain = chain.begin(table.key);
    chain.also(read(table.register(block), REGISTER_SIZE as u32).redirect(REGISTER));
    let register = chain.then(read_as::<Register>(REGISTER));
    let bytes = chain.then(read(REGISTER_AT, table.spec.block).indirect());
    fabric.run(node, &chain, reply).await?;
    let &Register { tag, at } = reply.get(register).map_err(|_| BlocksError::Refused(reply.verdict()))?;
    if at.is_null() {
        return Ok(Found { tag, bytes: None });
    }
    let len = reply.get(bytes).map_err(BlocksError::Refused)?.len();
    if len != table.spec.block as usize {
        return Err(BlocksError::Damaged("a register that points to a short buffer"));
    }
    Ok(Found { tag, bytes: Some(bytes) })
}

/// Reads a block's tag.
async fn read_tag<F: Fabric>(fabric: &F, access: Access<'_>, block: u64) -> Result<Tag, BlocksError> {
    let Access { node, table, chain, reply } = access;
    let mut chain = chain.begin(table.key);
    let tag = chain.also(read_as::<Tag>(table.register(block)));
    fabric.run(node, &chain, reply).await?;
    reply.get(tag).copied().map_err(BlocksError::Refused)
}

/// Makes a replica have this write, unless it has a newer one.
async fn install<F: Fabric + Clock>(
    fabric: &F,
    access: Access<'_>,
    list: ListId,
    block: u64,
    tag: &Tag,
    bytes: &[u8],
) -> Result<(), BlocksError> {
    let Access { node, table, chain, reply } = access;
    let mode = if mutants::INSTALLS_OLDER.is_on() { Mode::Ne } else { Mode::Lt };
    let mut chain = chain.begin(table.key);
    chain.also(write(REGISTER, tag.as_bytes()));
    chain.then(allocate(list, [bytes, &[], &[]]).redirect(REGISTER_AT));
    let swing = cas_with::<Register>(mode, table.register(block), REGISTER);
    let swung = chain.then(swing.masked(&TAG_ALONE, &WHOLE).reclaiming(AT_OFFSET));
    let ack = match run_until_ready(fabric, node, &chain, reply).await {
        Err(error) => Err(of_install(error)),
        Ok(false) => Err(BlocksError::OutOfMemory),
        Ok(true) => match reply.status(swung) {
            Status::Ok => Ok(()),
            Status::CasFailed if !mutants::REFUSAL_IS_NO_ACK.is_on() => Ok(()),
            _ => Err(BlocksError::Refused(reply.verdict())),
        },
    };
    if mutants::ERROR_IS_ACK.is_on() { Ok(()) } else { ack }
}

/// Reads the highest writer id that was tried at a replica.
async fn read_highest_id<F: Fabric>(fabric: &F, access: Access<'_>) -> Result<u64, BlocksError> {
    let Access { node, table, chain, reply } = access;
    let mut chain = chain.begin(table.key);
    let highest = chain.also(read_as::<big_endian::U64>(table.highest()));
    fabric.run(node, &chain, reply).await?;
    reply.get(highest).map(|highest| highest.get()).map_err(BlocksError::Refused)
}

/// Raises the highest writer id of a replica to `number`, unless it is as high. Returns the one before. If that is
/// lower, this request has claimed the id at this replica.
async fn claim<F: Fabric>(fabric: &F, access: Access<'_>, number: u64) -> Result<u64, BlocksError> {
    let Access { node, table, chain, reply } = access;
    let number = big_endian::U64::new(number);
    let mut chain = chain.begin(table.key);
    let before = chain.also(cas(Mode::Lt, table.highest(), &number, &number));
    fabric.run(node, &chain, reply).await.map_err(of_install)?;
    reply.get(before).map(|before| before.get()).map_err(BlocksError::Refused)
}

/// Runs a phase at all replicas at once, until `needed` of them have carried it out.
async fn at_majority<'r, T, A: Future<Output = Result<T, Failure>>>(
    replicas: &'r mut [Replica],
    needed: usize,
    is_over: &Cell<bool>,
    mut ask: impl FnMut(&'r mut Replica) -> A,
) -> Result<Outcomes<T, Failure, REPLICAS_MAX>, Outcomes<T, Failure, REPLICAS_MAX>> {
    is_over.set(false);
    let mut replicas = replicas.iter_mut();
    let mut next = || {
        let asked = ask(replicas.next()?);
        Some(async {
            let outcome = asked.await;
            if outcome.as_ref().is_err_and(Failure::is_replaced) {
                is_over.set(true);
            }
            outcome
        })
    };
    let mut asked = [pin!(next()), pin!(next()), pin!(next()), pin!(next()), pin!(next())];
    let mut phase = pin!(quorum(needed, asked.each_mut().map(|asked| asked.as_mut())));
    // Once the configuration is over, no majority of it answers any more.
    std::future::poll_fn(|cx| match phase.as_mut().poll(cx) {
        Poll::Pending if is_over.get() => Poll::Ready(Err([const { None }; REPLICAS_MAX])),
        polled => polled,
    })
    .await
}

/// Returns the acknowledgement of an install, and adds it to `acks`.
fn counted_ack(ack: Result<(), Failure>, acks: &Cell<usize>) -> Result<(), Failure> {
    let is_lost =
        |failure: &Failure| matches!(failure.error, BlocksError::Store(StoreError::MemoryLost { .. }));
    let ack = match ack {
        Err(failure) if is_lost(&failure) && mutants::WIPED_ACK_COUNTS.is_on() => Ok(()),
        ack => ack,
    };
    acks.set(acks.get() + usize::from(ack.is_ok()));
    ack
}

const OVER: &str = "members of the store were replaced meanwhile, and the current members were not found: check that \
                    all nodes are in --pool, then retry";

/// Returns the error of an operation that could not go on in the next configuration.
fn failed_to_move(error: BlocksError, needed: usize) -> BlocksError {
    BlocksError::NoMajority { answered: 0, needed, ran: Ran::No, reason: Box::new(error) }
}

/// Whether this is the error of a phase in which a majority of the replicas had lost their memory.
fn is_majority_lost(error: &BlocksError) -> bool {
    let BlocksError::NoMajority { reason, .. } = error else { return false };
    matches!(**reason, BlocksError::Store(StoreError::MemoryLost { loss: Loss::Majority, .. }))
}

/// Returns the error of a phase in which too few replicas answered, and which has written nothing.
fn no_majority<T>(outcomes: Outcomes<T, Failure, REPLICAS_MAX>, needed: usize) -> BlocksError {
    let answered = outcomes.iter().flatten().filter(|outcome| outcome.is_ok()).count();
    let errors: Vec<BlocksError> =
        outcomes.into_iter().flatten().filter_map(Result::err).map(|failure| failure.error).collect();
    let is_lost = |error: &&BlocksError| matches!(error, BlocksError::Store(StoreError::MemoryLost { .. }));
    // While a majority has its memory, nothing is lost, so another error tells more.
    let is_majority_lost = errors.iter().filter(is_lost).count() >= needed;
    let telling = errors.iter().find(|error| is_lost(error) == is_majority_lost).or(errors.first());
    let telling = telling.cloned().map(|error| match error {
        BlocksError::Store(StoreError::MemoryLost { name, member, node, .. }) if is_majority_lost => {
            BlocksError::Store(StoreError::MemoryLost { name, member, node, loss: Loss::Majority })
        }
        other => other,
    });
    // A phase without errors was left because its configuration is over.
    let over = || BlocksError::Store(StoreError::Gone(OVER.into()));
    let reason = Box::new(telling.unwrap_or_else(over));
    BlocksError::NoMajority { answered, needed, ran: Ran::No, reason }
}

/// Returns the error of a phase as that of an operation of which this is known.
fn with_ran(error: BlocksError, ran: Ran) -> BlocksError {
    match error {
        BlocksError::NoMajority { answered, needed, reason, .. } => {
            BlocksError::NoMajority { answered, needed, ran, reason }
        }
        other => other,
    }
}

/// Returns the error of a chain that changes a replica. Even if the chain ran, its CAS may have failed, so the outcome
/// is unknown.
fn of_install(error: FabricError) -> BlocksError {
    BlocksError::Fabric(error.map_ran(|ran| if ran == Ran::No { Ran::No } else { Ran::Unknown }))
}

impl<F: Fabric> PrismRs<F> {
    /// Creates a client of the store that `members` describe. Sends no request. Members that did not respond are asked
    /// again by each operation.
    ///
    /// # Errors
    /// [`StoreError`]; nothing was changed.
    pub fn of(fabric: F, members: &Members) -> Result<PrismRs<F>, StoreError> {
        members.check_replicas::<PrismRsKind>()?;
        let (count, members) = (members.list().len(), Rc::new(members.clone()));
        let replica = |index| Replica::new(&fabric, &members, index);
        let replicas = (0..count).map(replica).collect::<Result<Box<[_]>, _>>()?;
        let spec = replicas.iter().find_map(Replica::spec).expect("a member has a description");
        let class =
            Class::for_len(spec.block as usize).expect("a block is no longer than the longest buffer");
        let (configuration, is_over) = (members.configuration(), Cell::new(false));
        let shared = Rc::new(Shared { writer: Writer::new(), newest: RefCell::new(members) });
        Ok(PrismRs { fabric, spec, list: class.list(), replicas, configuration, is_over, shared })
    }

    /// Creates the same client for another task. Both share the writer id.
    pub fn another(&self) -> PrismRs<F>
    where
        F: Clone,
    {
        let replicas = self.replicas.iter().map(Replica::another).collect();
        let (fabric, shared) = (self.fabric.clone(), Rc::clone(&self.shared));
        let PrismRs { spec, list, configuration, .. } = *self;
        PrismRs { fabric, spec, list, replicas, configuration, is_over: Cell::new(false), shared }
    }
}
