//! Recovery: the settlement of the transactions that dead clients have left.
//!
//! A recoverer fences the client of an expired lease and looks at its lanes, at every member, until two rounds of looks
//! find the same. Then it confirms that the client still has its id: else another recoverer was faster. A transaction
//! was committed if a backup has its whole record, or if it is DECIDED or DONE at a primary. Then the recoverer copies
//! the records of the primaries to the backups that lack them, has all primaries install the values, and then the
//! backups apply them. All other transactions were aborted: the recoverer has all primaries free their locks. Last, it
//! releases the id.
//!
//! Recoverers need no lock and no id, may die at any point, and may be several. All requests name their transaction,
//! and members ignore those for a transaction that is not the last one of its lane.
//!
//! Another recoverer may copy a record to one member after this one's look there, and truncate the record at another
//! member before this one's look there. The looks of one round would then miss the record at both members, and the id
//! would be released although the first record is left. What a lane has at a member only ascends while the client is
//! fenced, so two rounds that find the same have found what all members had at one instant.
//!
//! Differs from the paper (SOSP'15, 5.3): there, members vote on each transaction, also by "truncated".
//!
//! Invariant: no verdict is given before the client was fenced, its lanes looked at, and its lease confirmed.
//! Invariant: a verdict is on the lanes as they were at one instant after the fence.
//! Invariant: a record is truncated once all primaries have installed its transaction. So a later recoverer that no
//! longer finds the record finds no lock either.

use super::log::{RecordHeader, State, TxnId};
use super::mutants;
use super::request::{LaneState, Request};
use super::site::{Buffers, Site};
use crate::lease::{ClientId, Expired, LeaseError};
use crate::members::all;
use crate::txn::TxnError;
use crate::txn::session::Recovery;
use farside_remote::clock::Clock;
use farside_remote::{Fabric, read};
use std::collections::BTreeMap;
use std::num::NonZeroU64;
use zerocopy::{FromBytes, IntoBytes};

/// State of a transaction at all members.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Evidence {
    /// Stamp of the transaction, if it was committed.
    stamp: Option<u64>,
    /// Whether something is left to be settled.
    is_open: bool,
}

impl<F: Fabric + Clock> Site<F> {
    /// Recovers the client of an expired lease.
    ///
    /// # Errors
    /// [`TxnError`]; the store is as correct as before.
    pub(super) async fn recover(&self, expired: Expired) -> Result<Recovery, TxnError> {
        self.fetch_keys().await?;
        let (id, nonce) = (expired.id(), expired.nonce());
        let fenced = self.fence(expired).await?;
        let states = self.look_until_equal(id, nonce).await?;
        let is_recovered = self.leases.entry(id).await?.nonce() != Some(nonce);
        let mut recovery = Recovery::default();
        if is_recovered && !mutants::LEASE_UNCONFIRMED.is_on() {
            return Ok(recovery);
        }
        for (txn, Evidence { stamp, .. }) in evidence(&states).into_iter().filter(|(_, of)| of.is_open) {
            match stamp {
                Some(stamp) => {
                    self.copy_records(txn, stamp).await?;
                    self.settle_at_all(&Request::Commit { txn, stamp }).await?;
                    self.settle_at_all(&Request::Truncate { txn }).await?;
                    recovery.committed += 1;
                }
                None => {
                    self.settle_at_all(&Request::Abort { txn }).await?;
                    recovery.aborted += 1;
                }
            }
        }
        match self.leases.free(fenced.recovered()).await {
            Ok(()) => recovery.clients += 1,
            Err(LeaseError::Lost) => {} // Another client has recovered it.
            Err(error) => return Err(error.into()),
        }
        Ok(recovery)
    }

    /// Returns the states of all lanes of a fenced client, by member and lane, as they were at one instant. They may be
    /// of several instants if another recoverer has released the id: lanes of the next holder change all the time.
    async fn look_until_equal(
        &self,
        id: ClientId,
        nonce: NonZeroU64,
    ) -> Result<Vec<Vec<LaneState>>, TxnError> {
        let mut states = self.look_at_all(id).await?;
        while !mutants::LOOKED_ONCE.is_on() {
            let again = self.look_at_all(id).await?;
            if again == states {
                break;
            }
            let is_released = self.leases.entry(id).await?.nonce() != Some(nonce);
            if is_released && !mutants::LOOKED_ON.is_on() {
                break;
            }
            states = again;
        }
        Ok(states)
    }

    /// Copies the records that the primaries have of a committed transaction to all backups. A backup refuses a record
    /// that it has, or has applied.
    async fn copy_records(&self, txn: TxnId, stamp: u64) -> Result<(), TxnError> {
        let (backups, mut own) = (self.shards[0].spec().backups, Buffers::default());
        let is_copied = backups > 0 && !mutants::RECORD_UNCOPIED.is_on();
        for shard in (0..self.shards.len()).filter(|_| is_copied) {
            let of = &self.shards[shard];
            let number = txn.entry().and_then(|entry| of.table.number(entry));
            let number = number.ok_or(TxnError::Damaged("a transaction of an unknown lane"))?;
            let mut chain = own.chain.begin(of.key());
            let read = chain.also(read(of.table.record(number, 0), of.spec().record_bytes()));
            self.fabric.run(of.node, &chain, &mut own.reply).await.map_err(TxnError::of_read)?;
            let bytes = own.reply.get(read).map_err(TxnError::Refused)?;
            let Ok((header, writes)) = RecordHeader::ref_from_prefix(bytes) else { continue };
            let Some(writes) = writes.get(..header.len()) else { continue };
            if header.txn != txn || !header.is_sound(writes) {
                continue; // The transaction has not reached this member, or another recoverer was faster.
            }
            let mut record = RecordHeader::new(txn, stamp, writes).as_bytes().to_vec();
            record.extend_from_slice(writes);
            for part in 1..=backups {
                let request = Request::Replicate { txn, part: part.into(), record: &record };
                self.settle(self.backup_of(shard, part), &mut own, &request).await?;
            }
        }
        Ok(())
    }

    /// Makes a request at all members. Those that the transaction has not reached ignore it.
    async fn settle_at_all(&self, request: &Request<'_>) -> Result<(), TxnError> {
        let settled = (0..self.shards.len()).map(|shard| async move {
            let mut own = Buffers::default();
            self.settle(shard, &mut own, request).await.map(drop)
        });
        all(settled).await.into_iter().collect()
    }
}

/// The transactions of a client, from the states of its lanes, in the order of their numbers.
fn evidence(states: &[Vec<LaneState>]) -> BTreeMap<TxnId, Evidence> {
    let mut evidence: BTreeMap<TxnId, Evidence> = BTreeMap::new();
    for state in states.iter().flatten() {
        let word = state.word;
        if word.txn != TxnId::NONE {
            let of = evidence.entry(word.txn).or_default();
            of.is_open |= word.is_open();
            let is_committed = match word.state {
                State::Decided => true,
                State::Done => !mutants::DONE_IGNORED.is_on(),
                State::Aborted | State::Locked => false,
            };
            if is_committed {
                of.stamp = Some(word.stamp);
            }
        }
        for (txn, stamp) in &state.records {
            let of = evidence.entry(*txn).or_default();
            of.is_open = true;
            if !mutants::RECORD_IGNORED.is_on() {
                of.stamp = Some(*stamp);
            }
        }
    }
    evidence
}
