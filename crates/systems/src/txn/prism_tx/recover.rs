//! Recovery: the settlement of the transactions that dead clients have left.
//!
//! A recoverer fences the client of an expired lease and reads its log, at every member. Then it confirms that the
//! client still has its id: else another recoverer was faster, and the entries may be those of the id's next holder.
//! Then it settles the client's transactions by ascending timestamps. If an entry of a transaction is DECIDED or DONE,
//! it was committed: the recoverer installs what its entries say. Else it was aborted: the recoverer backs it out.
//! Last, it closes the entries and releases the id.
//!
//! Recoverers need no lock and no id, and may die at any point. If a transaction waits for one of another dead client,
//! the recoverer goes on with the transactions of both, in the order of their timestamps.
//!
//! Invariant: no verdict is given before the client was fenced, its log read at all members, and its lease confirmed.
//! Invariant: an entry is read once. What it was then counts.
//! Invariant: an entry is closed by CAS on its word, after its transaction is settled at all members.

use super::commit::Source;
use super::layout::{ADDRESS_OFFSET, EntryId, Settled, Slot, State, Timestamp, Word, Write, decode_body};
use super::mutants;
use super::site::{Buffers, Site};
use crate::lease::{ClientId, Expired, Fenced, LeaseError, Observer};
use crate::members::all;
use crate::txn::TxnError;
use crate::txn::session::Recovery;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, Mode, Out, cas, read, read_as};
use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::Duration;

/// Pauses between two looks at an intent that is not settled.
const PAUSE_FIRST: Duration = Duration::from_micros(10);
const PAUSE_MAX: Duration = Duration::from_millis(1);
/// Number of keys that one chain reads or raises.
const KEYS_PER_CHAIN: usize = 32;

/// Reason why a transaction was not backed out.
pub(super) enum Stop {
    /// It waits for a transaction of the client of this expired lease.
    Blocked(Expired),
    Error(TxnError),
}

impl From<TxnError> for Stop {
    fn from(error: TxnError) -> Stop {
        Stop::Error(error)
    }
}

/// An entry of a dead client's log, as it was read.
struct Found {
    shard: usize,
    entry: EntryId,
    word: Word,
    /// Empty if the entry is DONE.
    body: Vec<u8>,
}

/// The transactions of dead clients that are not settled yet.
type Unsettled = BTreeMap<Timestamp, Vec<Found>>;

impl<F: Fabric + Clock> Site<F> {
    /// Recovers the client of an expired lease, and those that it waits for.
    ///
    /// # Errors
    /// [`TxnError`]; the store is as correct as before.
    pub(super) async fn recover(
        &self,
        observer: &RefCell<Observer>,
        expired: Expired,
    ) -> Result<Recovery, TxnError> {
        let (mut recovery, mut dead, mut left) = (Recovery::default(), Vec::new(), Unsettled::new());
        let mut next = Some(expired);
        while let Some(expired) = next.take() {
            if let Some((fenced, found)) = self.find(expired).await? {
                dead.push(fenced);
                left.extend(found);
            }
            if mutants::ID_FREED_EARLY.is_on() {
                left.clear();
            }
            let next_of = |left: &Unsettled| match mutants::LARGER_FIRST.is_on() {
                false => left.first_key_value().map(|(ts, _)| *ts),
                true => left.last_key_value().map(|(ts, _)| *ts),
            };
            while let Some(ts) = next_of(&left) {
                let found = &left[&ts];
                let commits = match mutants::VERDICT_FROM_SLOTS.is_on() {
                    false => is_commit(found),
                    true => self.has_item(ts, found).await?,
                };
                let settled = match commits {
                    true => self.redo(ts, found).await.map_err(Stop::Error),
                    false => self.back_out_all(observer, &dead, ts, found).await,
                };
                match settled {
                    Ok(()) => {}
                    Err(Stop::Blocked(other)) => {
                        next = Some(other);
                        break;
                    }
                    Err(Stop::Error(error)) => return Err(error),
                }
                match commits {
                    true => recovery.committed += 1,
                    false => recovery.aborted += 1,
                }
                left.remove(&ts);
            }
        }
        for fenced in dead {
            match self.leases.free(fenced.recovered()).await {
                Ok(()) => recovery.clients += 1,
                Err(LeaseError::Lost) => {} // Another client has recovered it.
                Err(error) => return Err(error.into()),
            }
        }
        Ok(recovery)
    }

    /// Fences a client and reads its log at all members. Returns the transactions to settle; `None` if another
    /// recoverer has settled them.
    async fn find(&self, expired: Expired) -> Result<Option<(Fenced, Unsettled)>, TxnError> {
        self.fetch_keys().await?;
        let (id, nonce) = (expired.id(), expired.nonce());
        let read_all = || all((0..self.shards.len()).map(|shard| self.read_log(shard, id)));
        let early = if mutants::LOG_BEFORE_FENCE.is_on() { Some(read_all().await) } else { None };
        let fenced = self.fence(expired).await?;
        let read = match early {
            Some(read) => read,
            None => read_all().await,
        };
        let read = read.into_iter().collect::<Result<Vec<Vec<Found>>, _>>()?;
        let is_recovered = self.leases.entry(id).await?.nonce() != Some(nonce);
        if is_recovered && !mutants::LEASE_UNCONFIRMED.is_on() {
            return Ok(None);
        }
        let mut transactions = Unsettled::new();
        for found in read.into_iter().flatten() {
            transactions.entry(found.word.ts).or_default().push(found);
        }
        // Transactions of former holders, and those that another recoverer has closed.
        transactions.retain(|_, found| found.iter().any(|found| found.word.is_unsettled()));
        Ok(Some((fenced, transactions)))
    }

    /// Reads the entries of a fenced client at a member that are not free.
    async fn read_log(&self, shard: usize, client: ClientId) -> Result<Vec<Found>, TxnError> {
        let words = self.words_of(shard, client).await?;
        let (mut own, mut log) = (Buffers::default(), Vec::new());
        for (lane, word) in (0..).zip(words) {
            let entry = EntryId { client, lane };
            let body = match word.state() {
                Some(State::Free) => continue,
                Some(State::Done) => Vec::new(),
                Some(State::Active | State::Decided) => self.read_body(shard, entry, &mut own).await?.0,
                None => return Err(TxnError::Damaged("a log entry in no state")),
            };
            log.push(Found { shard, entry, word, body });
        }
        Ok(log)
    }

    /// Reads the body of an entry, and then its word.
    async fn read_body(
        &self,
        shard: usize,
        entry: EntryId,
        own: &mut Buffers,
    ) -> Result<(Vec<u8>, Word), TxnError> {
        let table = &self.shards[shard];
        let mut chain = own.chain.begin(table.key());
        let body = chain.also(read(table.body(entry), table.spec().body_len() as u32));
        let word = chain.also(read_as::<Word>(table.word(entry)));
        self.fabric.run(table.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
        let body = own.reply.get(body).map_err(TxnError::Refused)?.to_vec();
        Ok((body, *own.reply.get(word).map_err(TxnError::Refused)?))
    }

    /// Completes a committed transaction: installs what its entries say, at all members, and then closes them.
    async fn redo(&self, ts: Timestamp, found: &[Found]) -> Result<(), TxnError> {
        let unsettled = || found.iter().filter(|found| found.word.is_unsettled());
        let installs = unsettled().map(|found| async move {
            let writes = writes_of(ts, found)?;
            let mut own = Buffers::default();
            self.install(found.shard, &mut own, Source::Log, ts, &writes).await.map_err(|(_, error)| error)
        });
        if mutants::DECIDED_ERASED.is_on() {
            for (of, install) in unsettled().zip(installs) {
                install.await?;
                self.close(std::slice::from_ref(of)).await?;
            }
            return Ok(());
        }
        all(installs).await.into_iter().collect::<Result<Vec<()>, _>>()?;
        self.close(found).await
    }

    /// Aborts a transaction at all members, and then closes its entries.
    async fn back_out_all(
        &self,
        observer: &RefCell<Observer>,
        dead: &[Fenced],
        ts: Timestamp,
        found: &[Found],
    ) -> Result<(), Stop> {
        for of in found {
            let slots: Vec<u64> = writes_of(ts, of)?.iter().map(|write| write.slot).collect();
            let waiting = async |other: EntryId| {
                if dead.iter().any(|fenced| fenced.id() == other.client) {
                    return Err(Stop::Error(TxnError::Damaged("an intent that no recovery settles")));
                }
                let observed = self.leases.observe(observer, other.client).await;
                match observed.map_err(TxnError::from)?.1 {
                    Some(expired) => Err(Stop::Blocked(expired)),
                    None => Ok(()),
                }
            };
            self.back_out(of.shard, of.entry, ts, &slots, waiting).await?;
        }
        Ok(self.close(found).await?)
    }

    /// Settles the keys of an aborted transaction at a member, without the PWs that it has replaced. Calls `waiting`
    /// again and again while another client's transaction is in the way.
    ///
    /// # Errors
    /// An error of a chain, or of `waiting`. The call may be repeated.
    pub(super) async fn back_out(
        &self,
        shard: usize,
        entry: EntryId,
        ts: Timestamp,
        slots: &[u64],
        mut waiting: impl AsyncFnMut(EntryId) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        let (table, mut own) = (&self.shards[shard], Buffers::default());
        // If PW < TS, the transaction has not prepared the key. If C >= TS, the key is settled.
        let mut left = Vec::new();
        for slots in slots.chunks(KEYS_PER_CHAIN) {
            let mut chain = own.chain.begin(table.key());
            let outs: Vec<Out<Slot>> =
                slots.iter().map(|slot| chain.also(read_as::<Slot>(table.slot(*slot)))).collect();
            self.fabric.run(table.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
            for (slot, out) in slots.iter().zip(outs) {
                let Slot { prepared, settled } = own.reply.get(out).map_err(TxnError::Refused)?;
                let is_prepared = prepared.pw >= ts || mutants::RAISED_UNPREPARED.is_on();
                if is_prepared && settled.c < ts {
                    left.push(*slot);
                }
            }
        }
        if left.is_empty() {
            return Ok(());
        }
        let smaller = match mutants::RAISED_WITHOUT_WAIT.is_on() {
            false => self.smaller_intents(shard, entry, ts, &left, &mut own).await?,
            true => Vec::new(),
        };
        for (other, word, slots) in smaller {
            let mut pause = PAUSE_FIRST;
            while self.is_open(shard, other, word, &slots, &mut own).await? {
                self.fabric.sleep(pause).await;
                pause = (pause * 2).min(PAUSE_MAX);
                waiting(other).await?;
            }
        }
        let to = Settled::at_time(ts);
        for slots in left.chunks(KEYS_PER_CHAIN) {
            let mut chain = own.chain.begin(table.key());
            for slot in slots {
                chain.also(cas(Mode::Lt, table.settled(*slot), &to, &to).masked(&Settled::C, &Settled::C));
            }
            self.fabric.run(table.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
            accepted(&own)?;
        }
        Ok(())
    }

    /// Returns the other open intents at a member that have smaller timestamps and name one of these slots: entry, word
    /// and slots of each. All of them were complete before the slots were read: a transaction with a smaller timestamp
    /// that prepares later finds PW above its own timestamp.
    async fn smaller_intents(
        &self,
        shard: usize,
        entry: EntryId,
        ts: Timestamp,
        slots: &[u64],
        own: &mut Buffers,
    ) -> Result<Vec<(EntryId, Word, Vec<u64>)>, TxnError> {
        let table = &self.shards[shard];
        let words = self.words(shard, 0, table.spec().entries()).await?;
        let mut intents = Vec::new();
        for (number, word) in (0..).zip(words) {
            let other = table.entry_numbered(number);
            if other == entry || !word.is_unsettled() || word.ts >= ts {
                continue;
            }
            let (body, word_after) = self.read_body(shard, other, own).await?;
            if word_after != word {
                continue;
            }
            let writes = decode_body(&body).filter(|(of, _)| *of == word.ts);
            let (_, writes) = writes.ok_or(TxnError::Damaged("a log entry with another body"))?;
            let named: Vec<u64> =
                writes.iter().map(|write| write.slot).filter(|slot| slots.contains(slot)).collect();
            if !named.is_empty() {
                intents.push((other, word, named));
            }
        }
        Ok(intents)
    }

    /// Whether an entry still has this word, and its transaction is not settled at one of these slots.
    async fn is_open(
        &self,
        shard: usize,
        entry: EntryId,
        word: Word,
        slots: &[u64],
        own: &mut Buffers,
    ) -> Result<bool, TxnError> {
        let table = &self.shards[shard];
        let mut is_unsettled = false;
        for slots in slots.chunks(KEYS_PER_CHAIN) {
            let mut chain = own.chain.begin(table.key());
            let now = chain.also(read_as::<Word>(table.word(entry)));
            let outs: Vec<Out<Settled>> =
                slots.iter().map(|slot| chain.also(read_as::<Settled>(table.settled(*slot)))).collect();
            self.fabric.run(table.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
            if *own.reply.get(now).map_err(TxnError::Refused)? != word {
                return Ok(false);
            }
            for out in outs {
                is_unsettled |= own.reply.get(out).map_err(TxnError::Refused)?.c < word.ts;
            }
        }
        Ok(is_unsettled)
    }

    /// With a mutant: whether a slot has an item of a transaction.
    async fn has_item(&self, ts: Timestamp, found: &[Found]) -> Result<bool, TxnError> {
        let mut own = Buffers::default();
        for of in found.iter().filter(|found| found.word.is_unsettled()) {
            let table = &self.shards[of.shard];
            for write in writes_of(ts, of)? {
                let mut chain = own.chain.begin(table.key());
                let address = table.settled(write.slot).plus(ADDRESS_OFFSET.into());
                let written = chain.also(read_as::<Timestamp>(address).indirect());
                self.fabric.run(table.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
                if own.reply.get(written) == Ok(&ts) {
                    return Ok(true);
                }
            }
        }
        Ok(false)
    }

    /// Closes the entries of a transaction that is settled at all members: DECIDED becomes DONE, and ACTIVE free.
    async fn close(&self, found: &[Found]) -> Result<(), TxnError> {
        let unsettled = found.iter().filter(|found| found.word.is_unsettled());
        let closes = unsettled.map(|found| async move {
            let to = match found.word.state() {
                Some(State::Decided) if !mutants::DECIDED_ERASED.is_on() => {
                    Word::new(found.word.ts, State::Done)
                }
                _ => Word::FREE,
            };
            let mut own = Buffers::default();
            // Another recoverer may have closed it.
            self.change_word(found.shard, found.entry, (found.word, to), &mut own).await.map(drop)
        });
        all(closes).await.into_iter().collect()
    }
}

/// Whether a transaction with these entries was committed.
fn is_commit(found: &[Found]) -> bool {
    found.iter().any(|found| matches!(found.word.state(), Some(State::Decided | State::Done)))
}

/// Returns the writes of an entry of a transaction.
fn writes_of(ts: Timestamp, found: &Found) -> Result<Vec<Write<'_>>, TxnError> {
    match decode_body(&found.body) {
        Some((of, writes)) if of == ts => Ok(writes),
        _ => Err(TxnError::Damaged("a log entry with another body")),
    }
}

/// # Errors
/// An op of the last chain was refused.
fn accepted(own: &Buffers) -> Result<(), TxnError> {
    match own.reply.verdict() {
        farside_remote::Status::Ok => Ok(()),
        status => Err(TxnError::Refused(status)),
    }
}
