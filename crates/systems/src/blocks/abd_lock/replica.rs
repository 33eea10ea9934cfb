//! One replica, as all tasks of a client see it: its key, the requests of the protocol to it, and the locks that the
//! client may still hold there although no operation uses them any more (debts).
//!
//! A request that changes a replica is sent once. If its outcome is unknown, the lock that it concerns becomes a debt,
//! and [`Replica::settle`] frees this lock once the request cannot run any more: the session that carried it must have
//! a successor, and must have been silent for as long as a node keeps a silent session.
//!
//! In a store with leases, the client *joins* a replica before its first lock there: it binds its sessions with the
//! node to its nonce, and writes this nonce into the entry of its id. A claim reaches a majority, so the entry may be
//! empty, or have the nonce of a client whose claim of the same id has failed. Therefore whoever finds a lock at a
//! replica also finds there the nonce by which its owner is fenced.
//!
//! Invariant: a lock that this client may hold belongs to an operation or to a debt.
//! Invariant: a replica that has lost its memory never answers this client again, since only the member with the
//! incarnation that the store was created with grants a key.

use super::layout::{Spec, TAG_SIZE, Table};
use super::mutants;
use super::service::AbdLockKind;
use crate::blocks::BlocksError;
use crate::blocks::tag::{Tag, WriterId};
use crate::identity::{self, Identity};
use crate::lease::{Entry, Expired, Fenced, LockWord};
use crate::members::fetch_member;
use crate::store::{Member, Members, StoreError};
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::{
    ChainBuf, Fabric, FabricError, Mode, NodeId, Reply, Status, cas, fetch_add, read, read_as, write,
};
use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::poll_fn;
use std::ops::Range;
use std::rc::Rc;
use std::task::Poll;
use std::time::Duration;
use zerocopy::IntoBytes;
use zerocopy::little_endian::U64;

/// Pause before the first further attempt of a request. Each pause is twice as long as the one before.
const PAUSE: Duration = Duration::from_millis(1);
const PAUSE_MAX: Duration = Duration::from_millis(64);
/// Time for which a closed client tries to settle its debts at a replica that does not answer, unless twice the nodes'
/// silence is longer. Partitions and restarts last longer than a silence: a lock that is left held blocks its block.
const SETTLES_MAX: Duration = Duration::from_secs(5);
/// Number of debts from which on new operations do not use the replica. It bounds the memory of debts.
const DEBTS_MAX: usize = 64;

/// A replica of the store.
pub(super) struct Replica {
    members: Rc<Members>,
    index: usize,
    place: Cell<Place>,
    /// Description of the store at this replica, once the node has responded.
    store: RefCell<Option<Rc<Store>>>,
    standing: Cell<Standing>,
    /// Why the replica never responds again.
    lost: RefCell<Option<StoreError>>,
    debts: RefCell<VecDeque<Debt>>,
}

/// Whether the client has joined a replica.
#[derive(Clone, Copy)]
enum Standing {
    Outside,
    /// There are no leases.
    Free,
    /// The client's lease was last renewed at this time.
    Leased(Duration),
}

/// Location of a replica.
#[derive(Clone, Copy)]
struct Place {
    /// The node that probably holds the replica, and the number of the session in which the node granted the key of
    /// `table`.
    node: NodeId,
    session: u64,
    /// The replica's table; `None` until the node has responded.
    table: Option<Table>,
}

/// Buffers of the requests to one replica.
#[derive(Default)]
pub(super) struct Buffers {
    chain: ChainBuf,
    reply: Reply,
    /// The block that the last [`Replica::read`] of a whole block has found, in the output of its op.
    content: Range<usize>,
    /// The copy of the block to which a write under the same lock goes.
    spare: usize,
}

impl Buffers {
    /// The tag and the bytes that the last [`Replica::read`] of a whole block has returned.
    pub(super) fn content(&self) -> &[u8] {
        &self.reply.output(0)[self.content.clone()]
    }
}

/// Id and nonce of a client.
#[derive(Clone, Copy, Debug)]
pub(super) struct Claim {
    pub(super) id: WriterId,
    pub(super) nonce: u64,
}

/// Access to a replica for one chain.
struct Access<'a> {
    node: NodeId,
    table: Table,
    chain: &'a mut ChainBuf,
    reply: &'a mut Reply,
}

/// What a read has found.
struct Found {
    tag: Tag,
    content: Range<usize>,
    spare: usize,
}

/// A lock that the client may hold, and that no operation uses any more.
struct Debt {
    block: u64,
    word: LockWord,
    /// Tag and bytes of a WRITE under this lock that may be incomplete, and the copy to which it goes.
    content: Option<(Vec<u8>, usize)>,
    /// The request that may still run.
    in_flight: Option<InFlight>,
}

/// A request whose outcome is unknown.
#[derive(Clone, Copy)]
struct InFlight {
    /// Number of the session that carries the request.
    session: u64,
    /// When the client learned that the outcome is unknown.
    since: Duration,
}

/// Failure of a request to one replica.
#[derive(Debug)]
pub(super) struct Failure {
    pub(super) error: BlocksError,
    /// Whether the request may have been carried out.
    pub(super) ran: Ran,
    session: u64,
}

impl Failure {
    /// Whether this client is fenced at the replica.
    pub(super) fn is_fenced(&self) -> bool {
        matches!(&self.error, BlocksError::Fabric(error) if error.is_fenced())
    }

    /// Whether the replica may answer a later request.
    pub(super) fn may_pass(&self) -> bool {
        match &self.error {
            BlocksError::Fabric(FabricError::Refused(_) | FabricError::NoSuchNode(_)) => false,
            BlocksError::Fabric(_) => !self.is_fenced(),
            _ => false,
        }
    }
}

impl Replica {
    /// Creates the access to the member with this index, without a request.
    ///
    /// # Errors
    /// The fabric lacks a capability that ABDLOCK needs, or the description of the store is impossible.
    pub(super) fn new<F: Fabric>(
        fabric: &F,
        members: &Rc<Members>,
        index: usize,
    ) -> Result<Replica, StoreError> {
        let Member { node, session, store } = &members.list()[index];
        let (mut table, mut lost, mut known) = (None, None, None);
        match store {
            Ok(store) => {
                let part = Members::part(*node, *session, store.clone());
                table = Some(table_of(fabric, members, &part)?.1);
                known = Some(Rc::new(store.clone()));
            }
            Err(error @ StoreError::MemoryLost { .. }) => lost = Some(error.clone()),
            Err(_) => {}
        }
        let place = Cell::new(Place { node: *node, session: *session, table });
        let (members, lost, store) = (Rc::clone(members), RefCell::new(lost), RefCell::new(known));
        let standing = Cell::new(Standing::Outside);
        Ok(Replica { members, index, place, store, standing, lost, debts: RefCell::default() })
    }

    /// Parameters of the store at this replica, if it has responded.
    pub(super) fn spec(&self) -> Option<Spec> {
        self.place.get().table.map(|table| table.spec)
    }

    /// Whether the client may hold locks here that no operation uses.
    pub(super) fn has_debts(&self) -> bool {
        !self.debts.borrow().is_empty()
    }

    /// Reads the highest id that is known to be claimed. Tries again until `until` if the replica cannot be reached, or
    /// if the answer is lost.
    pub(super) async fn highest_id<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        until: Duration,
    ) -> Result<u64, Failure> {
        self.run_while(
            fabric,
            own,
            until,
            |_| true,
            async |Access { node, table, chain, reply }| {
                let mut chain = chain.begin(table.key);
                let highest = chain.also(read_as::<U64>(table.highest()));
                fabric.run(node, &chain, reply).await?;
                reply.get(highest).map(|highest| highest.get()).map_err(BlocksError::Refused)
            },
        )
        .await
    }

    /// Claims a client id, and tells later clients not to try it. `highest` is the highest id that the client knows to
    /// be claimed. If the id is taken, the error is [`Status::CasFailed`]. Tries again until `until` if the replica
    /// cannot be reached, or if the answer is lost: the nonce tells whether the claim is this one.
    pub(super) async fn claim<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        Claim { id, nonce }: Claim,
        highest: u64,
        until: Duration,
    ) -> Result<(), Failure> {
        let [highest, number] = [U64::new(highest), U64::new(id.number().into())];
        let nonce = U64::new(nonce);
        self.run_while(
            fabric,
            own,
            until,
            |_| true,
            async |Access { node, table, chain, reply }| {
                let mut chain = chain.begin(table.key);
                let claimed = chain.also(cas(Mode::Eq, table.nonce(id), &U64::ZERO, &nonce));
                // If it does not swap, later clients try some ids in vain: the word is a hint.
                chain.also(cas(Mode::Eq, table.highest(), &highest, &number));
                fabric.run(node, &chain, reply).await?;
                match reply.status(claimed) {
                    Status::Ok => Ok(()),
                    Status::CasFailed if reply.get(claimed).is_ok_and(|found| *found == nonce) => Ok(()),
                    refused => Err(BlocksError::Refused(refused)),
                }
            },
        )
        .await
    }

    /// Joins the replica: from now on, a fence of the claim's nonce ends all requests of this client to the replica,
    /// and whoever sees the client's id in a lock word finds this nonce. In a store without leases, does nothing.
    async fn join<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        Claim { id, nonce }: Claim,
    ) -> Result<(), Failure> {
        // No lock was asked for yet.
        let unjoined = |failure| Failure { ran: Ran::No, ..failure };
        self.run(fabric, own, async |_| Ok(())).await?;
        if self.spec().is_some_and(|spec| spec.lease_us.is_none()) {
            self.standing.set(Standing::Free);
            return Ok(());
        }
        if !mutants::LOCKS_UNBOUND.is_on() {
            let identity = Identity { client: id.number(), nonce };
            self.call(fabric, async |node, store| identity::bind(fabric, node, store, identity).await)
                .await
                .map_err(unjoined)?;
        }
        let (mut found, nonce) = (U64::ZERO, U64::new(nonce));
        let entered = self.run(fabric, own, async |Access { node, table, chain, reply }| {
            while found != nonce && !mutants::ENTRY_OF_THE_CLAIM.is_on() {
                let mut chain = chain.begin(table.key);
                let swapped = chain.also(cas(Mode::Eq, table.nonce(id), &found, &nonce));
                fabric.run(node, &chain, reply).await?;
                match reply.status(swapped) {
                    Status::Ok => break,
                    Status::CasFailed => found = *reply.get(swapped).map_err(BlocksError::Refused)?,
                    refused => return Err(BlocksError::Refused(refused)),
                }
            }
            Ok(())
        });
        entered.await.map_err(unjoined)?;
        self.renew(fabric, own, id).await.map_err(unjoined)
    }

    /// Renews the client's lease at this replica, if the client has joined it, four times within `lease`. Never ends.
    pub(super) async fn keep_lease<F: Fabric + Clock>(
        &self,
        fabric: &F,
        lease: Duration,
        id: impl Fn() -> Option<WriterId>,
    ) -> Infallible {
        let mut own = Buffers::default();
        loop {
            fabric.sleep(lease / 4).await;
            if let Some(id) = id()
                && matches!(self.standing.get(), Standing::Leased(_))
            {
                let _else_it_expires = self.renew(fabric, &mut own, id).await;
            }
        }
    }

    /// Renews the client's lease.
    async fn renew<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        id: WriterId,
    ) -> Result<(), Failure> {
        let (begun, one) = (fabric.now(), U64::new(1));
        let renewed = self.run(fabric, own, async |Access { node, table, chain, reply }| {
            let mut chain = chain.begin(table.key);
            let raised = chain.also(fetch_add(table.beat(id), &one));
            fabric.run(node, &chain, reply).await?;
            reply.get(raised).map(drop).map_err(BlocksError::Refused)
        });
        renewed.await?;
        self.standing.set(Standing::Leased(begun));
        Ok(())
    }

    /// Whether a lease that was last renewed at this time should have been renewed again.
    fn is_due<F: Clock>(&self, fabric: &F, renewed: Duration) -> bool {
        let lease = self.spec().and_then(|spec| spec.lease()).unwrap_or_default();
        fabric.now().saturating_sub(renewed) > lease / 2
    }

    /// Reads the entry of a client that has joined the replica.
    pub(super) async fn entry<F: Fabric>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        id: WriterId,
    ) -> Result<Entry, Failure> {
        self.run(fabric, own, async |Access { node, table, chain, reply }| {
            let mut chain = chain.begin(table.key);
            let entry = chain.also(read_as::<Entry>(table.nonce(id)));
            fabric.run(node, &chain, reply).await?;
            reply.get(entry).copied().map_err(BlocksError::Refused)
        })
        .await
    }

    /// Fences a client at this replica. Once this has succeeded, none of the client's requests to it runs any more.
    pub(super) async fn fence<F: Fabric>(&self, fabric: &F, expired: Expired) -> Result<Fenced, Failure> {
        let nonce = expired.nonce().get();
        if !mutants::TAKEN_UNFENCED.is_on() {
            self.call(fabric, async |node, store| identity::fence(fabric, node, store, nonce).await).await?;
        }
        Ok(expired.fenced_at_only_member())
    }

    /// Sends a control request about the store to the replica's node.
    async fn call<F: Fabric>(
        &self,
        fabric: &F,
        request: impl AsyncFnOnce(NodeId, &Store) -> Result<(), FabricError>,
    ) -> Result<(), Failure> {
        let session = || self.place.get().session;
        let reached = self.reach(fabric, &mut false).await;
        let (node, _) =
            reached.map_err(|error| Failure { error: error.into(), ran: Ran::No, session: session() })?;
        let store = self.store.borrow().clone().expect("the node has responded");
        let session = session();
        request(node, &store).await.map_err(|error| {
            let ran = error.ran();
            Failure { error: error.into(), ran, session }
        })
    }

    /// Asks for a block's lock. Returns the word of the client that holds it, if another one does. Joins the replica
    /// before that, if the client has not.
    pub(super) async fn lock<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        claim: Claim,
        (block, word): (u64, LockWord),
    ) -> Result<Option<LockWord>, Failure> {
        match self.standing.get() {
            Standing::Free => {}
            Standing::Outside => self.join(fabric, own, claim).await?,
            // The client's task has not run for a while: to others, the lease may seem expired from the first.
            Standing::Leased(renewed) if self.is_due(fabric, renewed) => {
                let renewed = self.renew(fabric, own, claim.id).await;
                renewed.map_err(|failure| Failure { ran: Ran::No, ..failure })?;
            }
            Standing::Leased(_) => {}
        }
        if self.debts.borrow().len() >= DEBTS_MAX {
            let reason = format!("{DEBTS_MAX} requests to it have unknown outcomes");
            let error = FabricError::Unreachable { node: self.place.get().node, reason };
            return Err(Failure { error: error.into(), ran: Ran::No, session: self.place.get().session });
        }
        let asked = self.run(fabric, own, async |Access { node, table, chain, reply }| {
            let mut chain = chain.begin(table.key);
            let found = chain.also(cas(Mode::Eq, table.lock(block), &LockWord::FREE, &word));
            fabric.run(node, &chain, reply).await?;
            let holder = *reply.get(found).map_err(BlocksError::Refused)?;
            Ok((reply.status(found) == Status::CasFailed).then_some(holder))
        });
        let asked = asked.await;
        if let Err(failure) = &asked
            && failure.ran != Ran::No
        {
            self.owe(fabric, block, word, None, failure);
        }
        asked
    }

    /// Reads a block's tag and, if `is_whole`, its bytes ([`Buffers::content`]). The caller holds the lock; if this
    /// request fails, the lock becomes a debt.
    pub(super) async fn read<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        block: u64,
        word: LockWord,
        is_whole: bool,
    ) -> Result<Tag, Failure> {
        let asked = self.run(fabric, own, async |Access { node, table, chain, reply }| {
            let (mut chain, spec) = (chain.begin(table.key), table.spec);
            let (copies, len) = (spec.copies(), spec.content_len());
            if is_whole {
                chain.also(read(table.content(block, 0), (copies * len) as u32));
            } else {
                (0..copies)
                    .for_each(|copy| _ = chain.also(read(table.content(block, copy), TAG_SIZE as u32)));
            }
            fabric.run(node, &chain, reply).await?;
            if reply.verdict() != Status::Ok {
                return Err(BlocksError::Refused(reply.verdict()));
            }
            if is_whole && reply.output(0).len() != copies * len {
                return Err(BlocksError::Damaged("a block that is too short"));
            }
            let tag_of = |copy: usize| {
                let found = if is_whole { &reply.output(0)[copy * len..] } else { reply.output(copy) };
                let tag = zerocopy::FromBytes::read_from_prefix(found);
                tag.map(|(tag, _)| tag)
                    .map_err(|_| BlocksError::Damaged("a block that is shorter than its tag"))
            };
            let (mut newest, mut tag): (_, Tag) = (0, tag_of(0)?);
            for copy in 1..copies {
                let other = tag_of(copy)?;
                if other > tag {
                    (newest, tag) = (copy, other);
                }
            }
            let spare = if mutants::WRITES_NEWEST_COPY.is_on() { newest } else { copies - 1 - newest };
            Ok(Found { tag, content: newest * len..(newest + 1) * len, spare })
        });
        let asked = asked.await.map(|Found { tag, content, spare }| {
            (own.content, own.spare) = (content, spare);
            tag
        });
        if let Err(Failure { error, session, .. }) = &asked {
            // A READ that runs late changes nothing.
            let failure = Failure { error: error.clone(), ran: Ran::No, session: *session };
            self.owe(fabric, block, word, None, &failure);
        }
        asked
    }

    /// Writes a block's tag and bytes under the lock under which the block was read, and frees the lock in the same
    /// chain if `then_frees`. Tries again until `until` if the request was certainly not carried out. If it fails, the
    /// lock becomes a debt.
    pub(super) async fn write<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        (block, word): (u64, LockWord),
        content: &[u8],
        then_frees: bool,
        until: Duration,
    ) -> Result<(), Failure> {
        let spare = own.spare;
        let written = self
            .run_until(fabric, own, until, async |access| {
                write_under(fabric, access, (block, word), (content, spare), then_frees).await
            })
            .await;
        written.inspect_err(|failure| self.owe(fabric, block, word, Some((content.to_vec(), spare)), failure))
    }

    /// Frees a lock. Tries again until `until` if the request was certainly not carried out. If it fails, the lock
    /// becomes a debt.
    pub(super) async fn free<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        (block, word): (u64, LockWord),
        until: Duration,
    ) -> Result<(), Failure> {
        let freed = self
            .run_until(fabric, own, until, async |access| free_lock(fabric, access, block, word).await)
            .await;
        freed.inspect_err(|failure| self.owe(fabric, block, word, None, failure))
    }

    /// Frees a lock of another client, which is fenced here. If this fails, the lock may still be held.
    pub(super) async fn free_of_fenced<F: Fabric>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        block: u64,
        word: LockWord,
    ) -> Result<(), Failure> {
        self.run(fabric, own, async |access| free_lock(fabric, access, block, word).await).await
    }

    /// Records that the client may hold a lock, since a request has failed.
    fn owe<F: Fabric + Clock>(
        &self,
        fabric: &F,
        block: u64,
        word: LockWord,
        content: Option<(Vec<u8>, usize)>,
        failure: &Failure,
    ) {
        let in_flight = failure.in_flight(fabric);
        self.debts.borrow_mut().push_back(Debt { block, word, content, in_flight });
    }

    /// Frees the locks that the client may hold without an operation, now and later, until `is_over` and none is left,
    /// or until the replica has not answered for [`SETTLES_MAX`] after that, or twice the `silence`.
    pub(super) async fn settle<F: Fabric + Clock>(
        &self,
        fabric: &F,
        silence: Duration,
        is_over: impl Fn() -> bool,
    ) {
        let (mut own, mut pause, mut over_since) = (Buffers::default(), PAUSE, None);
        let patience = SETTLES_MAX.max(2 * silence);
        loop {
            let next = poll_fn(|_| match self.debts.borrow_mut().pop_front() {
                Some(debt) => Poll::Ready(Some(debt)),
                None if is_over() => Poll::Ready(None),
                // The client's task polls this future whenever an operation has ended.
                None => Poll::Pending,
            });
            let Some(mut debt) = next.await else { return };
            let is_settled = self.settle_one(fabric, &mut own, &mut debt, silence).await;
            if is_settled {
                (pause, over_since) = (PAUSE, None);
                continue;
            }
            self.debts.borrow_mut().push_back(debt);
            if is_over() && fabric.now() - *over_since.get_or_insert(fabric.now()) > patience {
                return;
            }
            fabric.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Tries to settle a debt. Returns whether the client does not hold the lock any more.
    async fn settle_one<F: Fabric + Clock>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        debt: &mut Debt,
        silence: Duration,
    ) -> bool {
        let Debt { block, word, .. } = *debt;
        if let Some(InFlight { session, since }) = debt.in_flight {
            // If no session is open, this request has the pool open the next one.
            if let Err(failure) = self.held(fabric, own, block).await {
                return !failure.may_pass();
            }
            let Place { node, session: current, .. } = self.place.get();
            let has_ended = match current == session {
                true => !fabric.may_run_abandoned(node),
                false => fabric.now() - since > silence,
            };
            if !has_ended && !mutants::SETTLED_TOO_EARLY.is_on() {
                return false;
            }
            debt.in_flight = None;
        }
        let settled = match &debt.content {
            None => self.run(fabric, own, async |access| free_lock(fabric, access, block, word).await).await,
            Some((content, copy)) => match self.held(fabric, own, block).await {
                Ok(held) if held == word => {
                    let write = async |access: Access<'_>| {
                        write_under(fabric, access, (block, word), (content, *copy), true).await
                    };
                    self.run(fabric, own, write).await
                }
                // The chain has freed the lock, so its WRITE before that is complete.
                Ok(_) => Ok(()),
                Err(failure) => Err(Failure { ran: Ran::No, ..failure }),
            },
        };
        match settled {
            Ok(()) => true,
            Err(failure) => {
                debt.in_flight = failure.in_flight(fabric);
                !failure.may_pass()
            }
        }
    }

    /// Reads the word of a block's lock.
    async fn held<F: Fabric>(&self, fabric: &F, own: &mut Buffers, block: u64) -> Result<LockWord, Failure> {
        self.run(fabric, own, async |Access { node, table, chain, reply }| {
            let mut chain = chain.begin(table.key);
            let word = chain.also(read_as::<LockWord>(table.lock(block)));
            fabric.run(node, &chain, reply).await?;
            reply.get(word).copied().map_err(BlocksError::Refused)
        })
        .await
    }

    /// Runs an operation of one chain at the replica. Repeats it until `until`, as long as it was certainly not carried
    /// out and may be.
    async fn run_until<F: Fabric + Clock, O>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        until: Duration,
        operation: impl AsyncFnMut(Access<'_>) -> Result<O, BlocksError>,
    ) -> Result<O, Failure> {
        self.run_while(fabric, own, until, |failure| failure.ran == Ran::No, operation).await
    }

    /// Runs an operation of one chain at the replica. Repeats it until `until`, as long as it fails in a way that
    /// permits to repeat it, and may be carried out.
    async fn run_while<F: Fabric + Clock, O>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        until: Duration,
        may_repeat: impl Fn(&Failure) -> bool,
        mut operation: impl AsyncFnMut(Access<'_>) -> Result<O, BlocksError>,
    ) -> Result<O, Failure> {
        let mut pause = PAUSE;
        loop {
            let failure = match self.run(fabric, own, &mut operation).await {
                Err(failure) if may_repeat(&failure) && failure.may_pass() => failure,
                ended => return ended,
            };
            if fabric.now() >= until {
                return Err(failure);
            }
            fabric.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Runs an operation of one chain at the replica. Runs it again if the chain was refused under a key that may be
    /// that of a former session: such a chain changes nothing.
    async fn run<F: Fabric, O>(
        &self,
        fabric: &F,
        own: &mut Buffers,
        mut operation: impl AsyncFnMut(Access<'_>) -> Result<O, BlocksError>,
    ) -> Result<O, Failure> {
        let mut has_new_key = false;
        loop {
            let (node, table) = match self.reach(fabric, &mut has_new_key).await {
                Ok(place) => place,
                Err(error) => {
                    let (error, session) = (error.into(), self.place.get().session);
                    return Err(Failure { error, ran: Ran::No, session });
                }
            };
            let session = self.place.get().session;
            let Buffers { chain, reply, .. } = &mut *own;
            match operation(Access { node, table, chain, reply }).await {
                Ok(output) => return Ok(output),
                Err(BlocksError::Refused(Status::Access)) if !has_new_key => {
                    self.place.set(Place { table: None, ..self.place.get() });
                }
                Err(error) => {
                    let ran = error.ran();
                    return Err(Failure { error, ran, session });
                }
            }
        }
    }

    /// Returns the replica's node and table. Fetches the key if this is the first operation since the node responds, or
    /// the first in a new session.
    async fn reach<F: Fabric>(
        &self,
        fabric: &F,
        has_new_key: &mut bool,
    ) -> Result<(NodeId, Table), StoreError> {
        if let Some(lost) = &*self.lost.borrow() {
            return Err(lost.clone());
        }
        let Place { node, session, table } = self.place.get();
        if let Some(table) = table.filter(|_| fabric.session_number(node) == session) {
            return Ok((node, table));
        }
        let part = fetch_member(fabric, &self.members, self.index).await.inspect_err(|error| {
            if matches!(error, StoreError::MemoryLost { .. }) {
                self.lost.replace(Some(error.clone()));
            }
        })?;
        let (node, table) = table_of(fabric, &self.members, &part)?;
        if self.store.borrow().is_none() {
            self.store.replace(part.list()[0].store.clone().ok().map(Rc::new));
        }
        self.place.set(Place { node, session: part.list()[0].session, table: Some(table) });
        *has_new_key = true;
        Ok((node, table))
    }
}

impl Failure {
    /// The request as one that may still run, if it may.
    fn in_flight<F: Clock>(&self, fabric: &F) -> Option<InFlight> {
        let is_unknown = self.ran == Ran::Unknown;
        is_unknown.then(|| InFlight { session: self.session, since: fabric.now() })
    }
}

/// Writes a copy of a block under the lock with this word, and frees the lock if `then_frees`. In a store with leases,
/// the tag follows the bytes, so that the copy counts only once it is whole.
async fn write_under<F: Fabric>(
    fabric: &F,
    Access { node, table, chain, reply }: Access<'_>,
    (block, word): (u64, LockWord),
    (content, copy): (&[u8], usize),
    then_frees: bool,
) -> Result<(), BlocksError> {
    let mut chain = chain.begin(table.key);
    let free = || cas(Mode::Eq, table.lock(block), &word, &LockWord::FREE);
    let at = table.content(block, copy);
    if then_frees && mutants::UNLOCK_BEFORE_WRITE.is_on() {
        chain.also(free());
    }
    // A refused WRITE aborts the chain, so the lock stays held.
    if table.spec.lease_us.is_none() || mutants::TAG_WITH_BYTES.is_on() {
        chain.also(write(at, content));
    } else {
        chain.also(write(at.plus(TAG_SIZE as u64), &content[TAG_SIZE..]));
        chain.also(write(at, &content[..TAG_SIZE]));
    }
    if then_frees && !mutants::UNLOCK_BEFORE_WRITE.is_on() {
        chain.also(free());
    }
    fabric.run(node, &chain, reply).await?;
    match (reply.verdict(), reply.statuses().any(|status| status == Status::CasFailed)) {
        (Status::Ok, false) => Ok(()),
        (Status::Ok, true) => Err(BlocksError::Damaged("a lock that was taken from its living owner")),
        (refused, _) => Err(BlocksError::Refused(refused)),
    }
}

/// Frees a lock if it has this word.
async fn free_lock<F: Fabric>(
    fabric: &F,
    Access { node, table, chain, reply }: Access<'_>,
    block: u64,
    word: LockWord,
) -> Result<(), BlocksError> {
    let mut chain = chain.begin(table.key);
    if mutants::UNLOCKS_UNHELD.is_on() {
        chain.also(write(table.lock(block), LockWord::FREE.as_bytes()));
    } else {
        // If it does not swap, the client does not hold the lock, and frees nothing.
        chain.also(cas(Mode::Eq, table.lock(block), &word, &LockWord::FREE));
    }
    fabric.run(node, &chain, reply).await?;
    match reply.verdict() {
        Status::Ok => Ok(()),
        refused => Err(BlocksError::Refused(refused)),
    }
}

/// Returns the node and the table of a member, whose description is `part`.
///
/// # Errors
/// The fabric lacks a capability, or the description is impossible: a node may answer anything.
fn table_of<F: Fabric>(fabric: &F, members: &Members, part: &Members) -> Result<(NodeId, Table), StoreError> {
    let (node, store) = part.one_of::<AbdLockKind>(fabric)?;
    if store.parameters != members.store().parameters {
        return Err(StoreError::Gone(format!(
            "the replicas of store '{}' have different parameters: someone has damaged the catalog of node {}; drop \
             the store and create it again",
            store.name, node.0
        )));
    }
    Ok((node, Table::new(&store.parameters, store.extent()).map_err(StoreError::Gone)?))
}
