//! The members of a store, as clients and recoverers reach them.

use super::layout::{EntryId, Shard, Timestamp, Word};
use crate::identity;
use crate::keyed::Keyed;
use crate::lease::{self, ClientId, Expired, Fenced, Leases, Table};
use crate::rendezvous::Rendezvous;
use crate::store::{Members, StoreError};
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::{ChainBuf, Fabric, FabricError, Mode, Reply, Status, cas, read, read_as};
use std::rc::Rc;
use std::time::Duration;
use zerocopy::FromBytes;

/// Number of words that one READ returns.
const WORDS_PER_READ: u64 = 2048;
/// Pauses between attempts at a member that does not answer.
const PAUSE_FIRST: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);

/// The members of a store, with the keys of the client's sessions.
pub(super) struct Site<F> {
    pub(super) fabric: Rc<Keyed<F>>,
    pub(super) shards: Box<[Shard]>,
    pub(super) places: Rendezvous,
    /// The store's description at each member.
    pub(super) stores: Vec<Store>,
    pub(super) leases: Leases<Rc<Keyed<F>>>,
}

/// Buffers of a task that sends one chain at a time.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) chain: ChainBuf,
    pub(super) reply: Reply,
}

impl<F: Fabric + Clock> Site<F> {
    /// Creates access to the store that `members` describe. Sends no request.
    ///
    /// # Errors
    /// [`StoreError`]: a member has no description, or an impossible one.
    pub(super) fn new(fabric: F, members: &Members) -> Result<Site<F>, StoreError> {
        let whole = members.whole()?;
        let stores: Vec<Store> = whole.iter().map(|(_, store)| (*store).clone()).collect();
        let shard = |(node, store): &(_, &Store)| Shard::new(*node, &store.parameters, store.extent());
        let shards: Box<[Shard]> =
            whole.iter().map(shard).collect::<Result<_, _>>().map_err(StoreError::Gone)?;
        let table = Table { node: shards[0].node, key: shards[0].key(), at: shards[0].leases() };
        let fabric = Rc::new(Keyed::new(fabric, members));
        let leases = Leases::new(Rc::clone(&fabric), vec![table], shards[0].spec().ids);
        Ok(Site { fabric, shards, places: Rendezvous::of(members), stores, leases })
    }

    /// Length of a lease.
    pub(super) fn lease(&self) -> Duration {
        self.shards[0].spec().lease()
    }

    /// Fetches the keys of the members with whose nodes the client has another session by now. Precedes each operation.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed, and a key is outdated.
    #[inline]
    pub(super) async fn fetch_keys(&self) -> Result<(), TxnError> {
        self.fetch_first_keys(self.shards.len()).await
    }

    /// Does the same as [`Site::fetch_keys`] for the first members.
    #[inline]
    pub(super) async fn fetch_first_keys(&self, members: usize) -> Result<(), TxnError> {
        let granted = |member: usize, key| {
            self.shards[member].set_key(key);
            if member == 0 {
                self.leases.set_key(0, key);
            }
        };
        Ok(self.fabric.fetch_keys(members, granted).await?)
    }

    /// Whether the store has commit-wait.
    pub(super) fn has_commit_wait(&self) -> bool {
        self.shards[0].spec().clock_error_us.is_some()
    }

    /// If the store has commit-wait, waits until this timestamp has passed on every client's clock.
    pub(super) async fn await_clock(&self, ts: Timestamp) {
        let Some(error) = self.shards[0].spec().clock_error_us else { return };
        let passed = ts.clock().saturating_add(error.saturating_mul(2));
        loop {
            let wall = u64::try_from(self.fabric.wall().as_micros()).unwrap_or(u64::MAX);
            let now = wall.saturating_sub(self.stores[0].created);
            if now > passed {
                return;
            }
            self.fabric.sleep(Duration::from_micros(passed - now + 1)).await;
        }
    }

    /// Repeats an operation that is safe to repeat until its member answers, for at most `patience`, and as long as
    /// `goes_on` returns true.
    ///
    /// # Errors
    /// The error of the last attempt.
    pub(super) async fn persist<T>(
        &self,
        patience: Duration,
        goes_on: impl Fn() -> bool,
        mut operation: impl AsyncFnMut() -> Result<T, TxnError>,
    ) -> Result<T, TxnError> {
        let (mut until, mut pause) = (None, PAUSE_FIRST);
        loop {
            let done = match self.fetch_keys().await {
                Ok(()) => operation().await,
                Err(error) => Err(error),
            };
            let error = match done {
                Ok(done) => return Ok(done),
                Err(error) => error,
            };
            let may_pass = match &error {
                TxnError::Fabric(FabricError::Refused(_) | FabricError::NoSuchNode(_)) => false,
                TxnError::Fabric(error) => !error.is_fenced(),
                TxnError::OutOfMemory => true,
                _ => false,
            };
            let now = self.fabric.now();
            if !may_pass || now >= *until.get_or_insert(now + patience) || !goes_on() {
                return Err(error);
            }
            self.fabric.sleep(pause).await;
            pause = (pause * 2).min(PAUSE_MAX);
        }
    }

    /// Waits until no chain that was sent over this session with a member's node can run any more. `since` is the time
    /// at which the client learned that the outcome of such a chain is unknown, and `silence` the time of silence after
    /// which the node ends a session.
    ///
    /// # Errors
    /// The session may still carry out chains after `patience`.
    pub(super) async fn end_session(
        &self,
        shard: usize,
        (session, since): (u64, Duration),
        silence: Duration,
        (patience, goes_on): (Duration, impl Fn() -> bool),
    ) -> Result<(), TxnError> {
        let node = self.shards[shard].node;
        loop {
            let now = self.fabric.now();
            let has_ended = match self.fabric.session_number(node) == session {
                true => !self.fabric.may_run_abandoned(node),
                // The node learns of the end of the former session by its silence.
                false => now.saturating_sub(since) > silence,
            };
            if has_ended {
                return Ok(());
            }
            if now.saturating_sub(since) > patience || !goes_on() {
                return Err(TxnError::Lost);
            }
            self.fabric.sleep(PAUSE_MAX.min(silence / 8)).await;
            // If no session is open, a request has the pool open the next one.
            let _asked = self.read_word(shard, EntryId::FIRST, &mut Buffers::default()).await;
        }
    }

    /// Fences the client of an expired lease at all members.
    ///
    /// # Errors
    /// [`TxnError`]: the client may not be fenced everywhere.
    pub(super) async fn fence(&self, expired: Expired) -> Result<Fenced, TxnError> {
        for (shard, store) in self.shards.iter().zip(&self.stores).skip(1) {
            if !lease::mutants::TAKEN_UNFENCED.is_on() {
                let fenced = identity::fence(&*self.fabric, shard.node, store, expired.nonce().get()).await;
                fenced.map_err(TxnError::of_read)?;
            }
        }
        Ok(self.leases.fence(expired, &self.stores[0]).await?)
    }

    /// Reads words of a member's log: `count` from the entry with this number on.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn words(&self, shard: usize, first: u64, count: u64) -> Result<Vec<Word>, TxnError> {
        let table = &self.shards[shard];
        let (mut buffer, mut reply, mut words) = (ChainBuf::new(), Reply::new(), Vec::new());
        for at in (first..first + count).step_by(WORDS_PER_READ as usize) {
            let len = WORDS_PER_READ.min(first + count - at) as u32 * size_of::<Word>() as u32;
            let mut chain = buffer.begin(table.key());
            let found = chain.also(read(table.word_numbered(at), len));
            self.fabric.run(table.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
            let found = <[Word]>::ref_from_bytes(reply.get(found).map_err(TxnError::Refused)?);
            words.extend_from_slice(found.map_err(|_| SHORT)?);
        }
        if words.len() as u64 == count { Ok(words) } else { Err(SHORT) }
    }

    /// Reads the words of a client's entries at a member, by lane.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn words_of(&self, shard: usize, client: ClientId) -> Result<Vec<Word>, TxnError> {
        let lanes = u64::from(self.shards[shard].spec().lanes);
        self.words(shard, client.index() * lanes, lanes).await
    }

    /// Reads the word of an entry.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn read_word(
        &self,
        shard: usize,
        entry: EntryId,
        own: &mut Buffers,
    ) -> Result<Word, TxnError> {
        let shard = &self.shards[shard];
        let mut chain = own.chain.begin(shard.key());
        let word = chain.also(read_as::<Word>(shard.word(entry)));
        self.fabric.run(shard.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        own.reply.get(word).copied().map_err(TxnError::Refused)
    }

    /// Changes the word of an entry by CAS. Returns the word that it has had. The caller may repeat it: no two
    /// transactions have the same word.
    ///
    /// # Errors
    /// [`TxnError`]; the word may have been changed if [`TxnError::ran`] says so.
    pub(super) async fn change_word(
        &self,
        shard: usize,
        entry: EntryId,
        (from, to): (Word, Word),
        own: &mut Buffers,
    ) -> Result<Word, TxnError> {
        let shard = &self.shards[shard];
        let mut chain = own.chain.begin(shard.key());
        let found = chain.also(cas(Mode::Eq, shard.word(entry), &from, &to));
        self.fabric.run(shard.node, &chain, &mut own.reply).await.map_err(TxnError::Fabric)?;
        match own.reply.status(found) {
            Status::Ok | Status::CasFailed => own.reply.get(found).copied().map_err(TxnError::Refused),
            status => Err(TxnError::Refused(status)),
        }
    }
}

const SHORT: TxnError = TxnError::Damaged("a short READ of the log");
