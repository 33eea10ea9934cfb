//! The members of a store, as clients and recoverers reach them: by batches of requests.

use super::layout::{Shard, TxnId, Write};
use super::request::{
    ABORT, BACKUP, CLOSE, COMMIT, FENCE, GRANT, LOG, LOOK, LaneState, PROMOTE, PROMOTION, RAISE, Status,
    put_words, words,
};
use crate::keyed::Keyed;
use crate::lease::{ClientId, Expired, Lease, Leases, Table};
use crate::rendezvous::Rendezvous;
use crate::rpc::fasst::{Batch, Destination, REFUSED, STALE};
use crate::store::{Member, Members, StoreError};
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::draws::Draws;
use farside_remote::fabric::Ran;
use farside_remote::{Fabric, FabricError};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use std::rc::Rc;
use std::time::Duration;

/// Pauses between attempts at a member that does not answer.
const PAUSE_FIRST: Duration = Duration::from_micros(50);
const PAUSE_MAX: Duration = Duration::from_millis(5);
/// Number of times that a promoter asks for an epoch: others may have one, or take one at the same time.
const PROMOTES: u32 = 4;

/// The members of a store, with the keys of the client's sessions.
pub(super) struct Site<F> {
    pub(super) fabric: Rc<Keyed<F>>,
    pub(super) shards: Box<[Shard]>,
    pub(super) places: Rendezvous,
    pub(super) leases: Leases<Rc<Keyed<F>>>,
    /// For promoters: whether each member's memory is lost. Requests to such a member are answered as by one that has
    /// nothing.
    lost: Option<Box<[bool]>>,
}

/// Index of a member, and a bucket there.
pub(super) type BucketId = (usize, u64);

/// A request to a member.
#[derive(Clone, Debug)]
pub(super) struct Ask {
    /// Index of the member.
    pub(super) member: usize,
    pub(super) kind: u8,
    pub(super) payload: Vec<u8>,
    /// Longest possible payload of the response.
    pub(super) response_max: usize,
}

impl Ask {
    /// A request whose payload begins with these words, and is answered by a word at most.
    pub(super) fn new(member: usize, kind: u8, words: &[u64]) -> Ask {
        let mut payload = Vec::new();
        put_words(&mut payload, words);
        Ask { member, kind, payload, response_max: 8 }
    }
}

/// Response to a request.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Told {
    pub(super) status: Status,
    pub(super) payload: Vec<u8>,
}

impl Told {
    /// The response of a member that has nothing.
    fn of_nobody() -> Told {
        let mut payload = Vec::new();
        LaneState::default().encode(&mut payload);
        Told { status: Status::Done, payload }
    }
}

/// Reason why a request has no response.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Missed {
    /// Its packet was not answered.
    Fabric(FabricError),
    /// The member admits another epoch of this client: another client has recovered it.
    Stale,
    /// The member has refused the request, for this reason.
    Refused(String),
    /// The client has no key of the member any more, for this reason.
    Store(StoreError),
    /// It was not sent, since a request before it was not carried out.
    Unsent,
    /// No member gives such a response.
    Unknown,
}

impl Missed {
    /// Whether the request has run or may run.
    pub(super) fn may_run(&self) -> bool {
        match self {
            Missed::Fabric(error) => error.ran() != Ran::No,
            Missed::Unknown => true,
            Missed::Stale | Missed::Refused(_) | Missed::Store(_) | Missed::Unsent => false,
        }
    }

    /// The error of a transaction that has changed nothing by this request.
    pub(super) fn error(&self) -> TxnError {
        match self {
            Missed::Fabric(error) => TxnError::of_read(error.clone()),
            Missed::Stale => TxnError::Lost,
            Missed::Refused(reason) => TxnError::Fabric(FabricError::Refused(reason.clone())),
            Missed::Store(error) => TxnError::Store(error.clone()),
            Missed::Unsent => TxnError::Conflict,
            Missed::Unknown => TxnError::Damaged("a response that no node gives"),
        }
    }
}

/// Outcome of a request.
pub(super) type Asked = Result<Told, Missed>;

impl<F: Fabric + Clock> Site<F> {
    /// Creates access to the store that `members` describe. Sends no request.
    ///
    /// # Errors
    /// [`StoreError`]: a member has no description, or an impossible one.
    pub(super) fn new(fabric: F, members: &Members) -> Result<Site<F>, StoreError> {
        let whole = members.whole()?;
        let shard = |(node, store): &(_, &farside_remote::control::Store)| {
            Shard::new(*node, &store.parameters, store.extent())
        };
        let shards: Box<[Shard]> =
            whole.iter().map(shard).collect::<Result<_, _>>().map_err(StoreError::Gone)?;
        let backups = usize::from(shards[0].spec().backups);
        if shards.len() <= backups {
            return Err(StoreError::Gone(format!(
                "the store has {backups} backups of each key and only {} members: create it with at least {} members",
                shards.len(),
                backups + 1
            )));
        }
        Ok(Site::of(fabric, members, shards, None))
    }

    /// Creates a promoter's access to the members in this list, by its keys. Members without a description are lost.
    ///
    /// # Errors
    /// [`StoreError`]: an impossible description.
    pub(super) fn promoting(fabric: F, members: &Members) -> Result<Site<F>, StoreError> {
        let any = members.store();
        let shard = |member: &Member| {
            let store = member.store.as_ref().unwrap_or(any);
            Shard::new(member.node, &store.parameters, store.extent())
        };
        let shards = members.list().iter().map(shard).collect::<Result<_, _>>().map_err(StoreError::Gone)?;
        let lost = members.list().iter().map(|member| member.store.is_err()).collect();
        Ok(Site::of(fabric, members, shards, Some(lost)))
    }

    fn of(fabric: F, members: &Members, shards: Box<[Shard]>, lost: Option<Box<[bool]>>) -> Site<F> {
        let table = Table { node: shards[0].node, key: shards[0].key(), at: shards[0].table.leases() };
        let fabric = Rc::new(Keyed::new(fabric, members));
        let leases = Leases::new(Rc::clone(&fabric), vec![table], shards[0].spec().ids);
        // Incarnations change if a member is replaced, and keys must not move.
        let mut seeds = Draws(shards[0].spec().seed);
        let places = Rendezvous::seeded((0..shards.len()).map(|_| seeds.next()));
        Site { fabric, shards, places, leases, lost }
    }

    /// Whether a promoter knows that a member's memory is lost.
    pub(super) fn is_lost(&self, member: usize) -> bool {
        self.lost.as_ref().is_some_and(|lost| lost[member])
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

    /// Repeats an operation that is safe to repeat until its members answer, for at most `patience`, and as long as
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

    /// Makes requests, in as few batches as possible, each after the responses of the one before. If `until_refused`,
    /// sends no further batch after a request that was not carried out. Returns the outcomes in the same order.
    pub(super) async fn ask_all(
        &self,
        batch: &mut Batch,
        epoch: u64,
        asks: &[Ask],
        until_refused: bool,
    ) -> Vec<Asked> {
        let (mut outcomes, mut is_refused) = (Vec::with_capacity(asks.len()), false);
        while outcomes.len() < asks.len() && !(is_refused && until_refused) {
            batch.clear(epoch);
            let mut sent = Vec::new();
            for ask in &asks[outcomes.len()..] {
                if self.is_lost(ask.member) {
                    sent.push(None);
                    continue;
                }
                let shard = &self.shards[ask.member];
                let to = Destination { node: shard.node, key: shard.key() };
                let write = |out: &mut Vec<u8>| out.extend_from_slice(&ask.payload);
                let Some(place) = batch.push(to, ask.kind, ask.response_max, write) else { break };
                sent.push(Some(place));
            }
            assert!(!sent.is_empty(), "a request fits into a packet");
            if !batch.is_empty() {
                batch.send(&*self.fabric).await;
            }
            for place in sent {
                let outcome = match place.map(|place| batch.response(place)) {
                    None => Ok(Told::of_nobody()),
                    Some(Err(FabricError::Refused(reason))) => {
                        Err(self.refused(&asks[outcomes.len()], reason.clone()).await)
                    }
                    Some(Err(error)) => Err(Missed::Fabric(error.clone())),
                    Some(Ok(response)) if response.status == STALE => Err(Missed::Stale),
                    Some(Ok(response)) if response.status == REFUSED => {
                        Err(Missed::Refused(String::from_utf8_lossy(response.payload).into_owned()))
                    }
                    Some(Ok(response)) => match Status::of(response.status) {
                        Some(status) => Ok(Told { status, payload: response.payload.to_vec() }),
                        None => Err(Missed::Unknown),
                    },
                };
                is_refused |= !matches!(outcome, Ok(Told { status: Status::Done | Status::Absent, .. }));
                outcomes.push(outcome);
            }
        }
        outcomes.resize(asks.len(), Err(Missed::Unsent));
        outcomes
    }

    /// Finds out why a node has refused a packet. The store may have another configuration by now, whose keys this
    /// client does not get.
    #[cold]
    async fn refused(&self, ask: &Ask, reason: String) -> Missed {
        // A promoter that is refused looks at all members again.
        if self.lost.is_none() {
            self.fabric.forget(self.shards[ask.member].node);
            if let Err(TxnError::Store(error)) = self.fetch_keys().await {
                return Missed::Store(error);
            }
        }
        Missed::Fabric(FabricError::Refused(reason))
    }

    /// Makes requests that nothing but a lost response, or another epoch, prevents from being carried out, unless their
    /// transaction has ended before. If a log has the record of a later transaction of the lane, this one is complete.
    ///
    /// # Errors
    /// [`TxnError`]; any of the requests may have been carried out.
    pub(super) async fn settle(&self, batch: &mut Batch, epoch: u64, asks: &[Ask]) -> Result<(), TxnError> {
        let outcomes = self.ask_all(batch, epoch, asks, false).await;
        outcomes.into_iter().try_for_each(|outcome| match outcome {
            Ok(Told { status: Status::Done | Status::Ended, .. }) => Ok(()),
            Ok(_) => Err(TxnError::Damaged("a response that no node gives to this request")),
            Err(Missed::Fabric(error)) => Err(TxnError::Fabric(error)),
            Err(missed) => Err(missed.error()),
        })
    }

    /// Takes an epoch of the holder of a lease that nobody else has, above all that were granted before.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed for others. [`TxnError::Lost`] if the client was fenced, or has lost its id.
    pub(super) async fn grant(&self, lease: &Lease) -> Result<u64, TxnError> {
        self.epoch(GRANT, lease.id(), lease.nonce()).await
    }

    /// Takes an epoch of the client of an expired lease that nobody else has, above all that were granted before. The
    /// client gets none after it.
    ///
    /// # Errors
    /// [`TxnError`]; the client may be fenced. [`TxnError::Lost`] if the client has lost its id.
    pub(super) async fn fence(&self, expired: &Expired) -> Result<u64, TxnError> {
        self.epoch(FENCE, expired.id(), expired.nonce()).await
    }

    async fn epoch(&self, kind: u8, client: ClientId, nonce: NonZeroU64) -> Result<u64, TxnError> {
        let mut batch = Batch::new(client.number(), 0);
        let asked = self.ask_all(&mut batch, 0, &[Ask::new(0, kind, &[nonce.get()])], false).await;
        let told = asked
            .into_iter()
            .next()
            .expect("an outcome for each request")
            .map_err(|missed| missed.error())?;
        if told.status == Status::Ended {
            return Err(TxnError::Lost);
        }
        let epoch = words(&told.payload).map(|([epoch], _)| epoch);
        epoch.filter(|_| told.status == Status::Done).ok_or(TxnError::Damaged("an epoch that no node grants"))
    }

    /// Has all members admit only packets with this epoch of a client, and returns the states of the client's lanes, by
    /// member and lane.
    ///
    /// # Errors
    /// [`TxnError`]: some members may admit earlier packets. [`TxnError::Lost`] if a member admits a later epoch.
    pub(super) async fn raise(&self, client: ClientId, epoch: u64) -> Result<Vec<Vec<LaneState>>, TxnError> {
        let mut batch = Batch::new(client.number(), 0);
        let asks: Vec<Ask> = (0..self.shards.len()).map(|member| Ask::new(member, RAISE, &[])).collect();
        for outcome in self.ask_all(&mut batch, epoch, &asks, false).await {
            if outcome.map_err(|missed| missed.error())?.status != Status::Done {
                return Err(TxnError::Lost);
            }
        }
        self.look_at_all(client, epoch).await
    }

    /// Takes an epoch above those of all other promoters, and has all members admit only its packets, and fills.
    ///
    /// # Errors
    /// [`TxnError`]: some members may admit packets of others. [`TxnError::Lost`] if other promoters were faster.
    pub(super) async fn promote(&self) -> Result<u64, TxnError> {
        let (mut batch, mut epoch) = (Batch::new(0, 0), PROMOTION + 1);
        let asks: Vec<Ask> = (0..self.shards.len()).map(|member| Ask::new(member, PROMOTE, &[])).collect();
        for _ in 0..PROMOTES {
            let mut last = 0;
            for outcome in self.ask_all(&mut batch, epoch, &asks, false).await {
                let told = outcome.map_err(|missed| missed.error())?;
                let of_another = words(&told.payload).filter(|_| told.status == Status::Ended);
                last = of_another.map_or(last, |([epoch], _)| last.max(epoch));
            }
            if last == 0 {
                return Ok(epoch);
            }
            epoch = last.checked_add(1).ok_or(TxnError::Damaged("an epoch that no promoter has"))?;
        }
        Err(TxnError::Lost)
    }

    /// Returns the states of all lanes of a client, by member and lane. The members admit `epoch`, or it is 0.
    ///
    /// # Errors
    /// [`TxnError`]; nothing was changed. [`TxnError::Lost`] if a member admits a later epoch.
    pub(super) async fn look_at_all(
        &self,
        client: ClientId,
        epoch: u64,
    ) -> Result<Vec<Vec<LaneState>>, TxnError> {
        let (mut batch, lanes) = (Batch::new(client.number(), 0), usize::from(self.shards[0].spec().lanes));
        let look =
            |member, lane| Ask { response_max: size_of::<LaneState>(), ..Ask::new(member, LOOK, &[lane]) };
        let members = 0..self.shards.len();
        let asks: Vec<Ask> =
            members.flat_map(|member| (0..lanes as u64).map(move |lane| look(member, lane))).collect();
        let states = self.ask_all(&mut batch, epoch, &asks, false).await.into_iter().map(|outcome| {
            let told = outcome.map_err(|missed| missed.error())?;
            LaneState::decode(&told.payload).ok_or(TxnError::Damaged("a state of a lane that no node sends"))
        });
        let states: Vec<LaneState> = states.collect::<Result<_, _>>()?;
        Ok(states.chunks(lanes).map(<[LaneState]>::to_vec).collect())
    }

    /// Members that log the transactions of a client.
    pub(super) fn logs(&self, client: ClientId) -> impl Iterator<Item = usize> {
        let (members, backups) = (self.shards.len(), usize::from(self.shards[0].spec().backups));
        (0..=backups).map(move |number| (client.index() as usize + number) % members)
    }

    /// Requests that store a record.
    pub(super) fn log_asks(&self, client: ClientId, record: &[u8]) -> Vec<Ask> {
        let log = |member| Ask { payload: record.to_vec(), ..Ask::new(member, LOG, &[]) };
        self.logs(client).map(log).collect()
    }

    /// Requests that install writes at the backups.
    pub(super) fn backup_asks(&self, txn: TxnId, stamp: u64, writes: &[Write<'_>]) -> Vec<Ask> {
        let (mut asks, members) = (Vec::new(), self.shards.len());
        for ((member, bucket), writes) in by_bucket(writes) {
            for part in 1..=self.shards[0].spec().backups {
                let to = (member + usize::from(part)) % members;
                let mut ask = Ask::new(to, BACKUP, &[txn.bits(), stamp, bucket, part.into()]);
                writes.iter().for_each(|write| write.encode(&mut ask.payload));
                asks.push(ask);
            }
        }
        asks
    }

    /// Requests that install writes at the primaries, and free their buckets and all other locked ones.
    pub(super) fn commit_asks(
        &self,
        txn: TxnId,
        stamp: u64,
        writes: &[Write<'_>],
        locked: impl IntoIterator<Item = BucketId>,
    ) -> Vec<Ask> {
        let (mut groups, mut asks) = (by_bucket(writes), Vec::new());
        locked.into_iter().for_each(|bucket| _ = groups.entry(bucket).or_default());
        let mut groups = groups.into_iter().peekable();
        while let Some(((member, bucket), writes)) = groups.next() {
            let is_last = groups.peek().is_none_or(|((next, _), _)| *next != member);
            let mut ask = Ask::new(member, COMMIT, &[txn.bits(), stamp, bucket, u64::from(is_last)]);
            writes.iter().for_each(|write| write.encode(&mut ask.payload));
            asks.push(ask);
        }
        asks
    }

    /// Requests that free the locks of a transaction at these members.
    pub(super) fn abort_asks(txn: TxnId, members: impl IntoIterator<Item = usize>) -> Vec<Ask> {
        members.into_iter().map(|member| Ask::new(member, ABORT, &[txn.bits()])).collect()
    }

    /// Requests that say that the record of a transaction is not needed any more.
    pub(super) fn close_asks(&self, client: ClientId, txn: TxnId) -> Vec<Ask> {
        self.logs(client).map(|member| Ask::new(member, CLOSE, &[txn.bits()])).collect()
    }

    /// Whether the writes of a record lie at members of the store.
    pub(super) fn has_members(&self, writes: &[Write<'_>]) -> bool {
        writes.iter().all(|write| usize::from(write.member) < self.shards.len())
    }
}

/// Groups writes by member and bucket.
fn by_bucket<'w>(writes: &[Write<'w>]) -> BTreeMap<BucketId, Vec<Write<'w>>> {
    let mut groups: BTreeMap<BucketId, Vec<Write<'w>>> = BTreeMap::new();
    for write in writes {
        groups.entry((usize::from(write.member), write.bucket)).or_default().push(*write);
    }
    groups
}
