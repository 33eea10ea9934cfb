//! The members of a store, as clients and recoverers reach them.

use super::KIND;
use super::layout::{Shard, WHOLE_LINE};
use super::log::EntryId;
use super::request::{Answer, LaneState, Outcome, Request};
use crate::identity;
use crate::keyed::Keyed;
use crate::lease::{self, ClientId, Expired, Fenced, Leases, Table};
use crate::members::all;
use crate::rendezvous::Rendezvous;
use crate::store::{Members, StoreError};
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::control::Store;
use farside_remote::fabric::Ran;
use farside_remote::service::address;
use farside_remote::{Capabilities, ChainBuf, Fabric, FabricError, Reply};
use std::rc::Rc;
use std::time::Duration;

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

/// Buffers of a task that makes one request at a time.
#[derive(Default)]
pub(super) struct Buffers {
    pub(super) chain: ChainBuf,
    pub(super) reply: Reply,
    pub(super) request: Vec<u8>,
    pub(super) answer: Vec<u8>,
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
        let backups = usize::from(shards[0].spec().backups);
        if shards.len() <= backups {
            return Err(StoreError::Gone(format!(
                "the store has {backups} backups of each object and only {} members: create it with at least {} \
                 members",
                shards.len(),
                backups + 1
            )));
        }
        for shard in shards.iter().filter(|shard| shard.spec().line == WHOLE_LINE) {
            let (node, needs, has) = (shard.node, Capabilities::WHOLE_LINES, fabric.capabilities(shard.node));
            if !has.contains(needs) {
                return Err(StoreError::Lacks { kind: KIND, node, needs, has });
            }
        }
        let table = Table { node: shards[0].node, key: shards[0].key(), at: shards[0].table.leases() };
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
            let first = EntryId { client: ClientId::new(1).expect("not 0"), lane: 0 };
            let _asked = self.look(shard, &mut Buffers::default(), first).await;
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

    /// Calls the service of a member.
    ///
    /// # Errors
    /// [`FabricError`]; the service may have carried out the request if [`FabricError::ran`] says so.
    pub(super) async fn call<'b>(
        &self,
        shard: usize,
        own: &'b mut Buffers,
        request: &Request<'_>,
    ) -> Result<Answer<'b>, FabricError> {
        let shard = &self.shards[shard];
        let Buffers { request: bytes, answer, .. } = own;
        let service = address(shard.key(), bytes);
        request.encode(bytes);
        self.fabric.call(shard.node, service, bytes, answer).await?;
        Answer::decode(answer).ok_or_else(|| FabricError::Lost {
            node: shard.node,
            ran: Ran::Unknown,
            reason: "the store's answer is unknown to this release: use the same release on both sides"
                .into(),
        })
    }

    /// Returns the state of a lane at a member.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn look(
        &self,
        shard: usize,
        own: &mut Buffers,
        entry: EntryId,
    ) -> Result<LaneState, TxnError> {
        let looked = self.call(shard, own, &Request::Look { entry }).await.map_err(TxnError::of_read)?;
        LaneState::decode(looked.rest).ok_or(TxnError::Damaged("a state of a lane that no node sends"))
    }

    /// Returns the states of all lanes of a client, by member and lane.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed.
    pub(super) async fn look_at_all(&self, client: ClientId) -> Result<Vec<Vec<LaneState>>, TxnError> {
        let of_member = |shard: usize| async move {
            let (mut own, mut states) = (Buffers::default(), Vec::new());
            for lane in 0..self.shards[shard].spec().lanes {
                states.push(self.look(shard, &mut own, EntryId { client, lane }).await?);
            }
            Ok(states)
        };
        all((0..self.shards.len()).map(of_member)).await.into_iter().collect()
    }

    /// Makes a request at a member that changes nothing if it is repeated, and is answered by "done" or "stale".
    ///
    /// # Errors
    /// [`TxnError`]; the request may have been carried out.
    pub(super) async fn settle(
        &self,
        shard: usize,
        own: &mut Buffers,
        request: &Request<'_>,
    ) -> Result<Outcome, TxnError> {
        let answer = self.call(shard, own, request).await.map_err(TxnError::Fabric)?;
        match answer.outcome {
            outcome @ (Outcome::Done | Outcome::Stale) => Ok(outcome),
            _ => Err(TxnError::Damaged("an answer that no node gives to this request")),
        }
    }

    /// Index of a member that has copies of the objects of `shard`.
    pub(super) fn backup_of(&self, shard: usize, part: u8) -> usize {
        (shard + usize::from(part)) % self.shards.len()
    }
}
