//! Recovery: the settlement of the transactions that dead clients have left.
//!
//! A recoverer fences the client of an expired lease: it takes an epoch, if the client still has its id, and the client
//! gets none after it. Else another recoverer was faster, and the next holder has a later epoch. It has all members
//! admit only this epoch. From then on no packet of the client, and of an earlier recoverer, is handled. Then it
//! collects the states of the client's lanes at all members. A transaction was committed if a log has its whole record.
//! The recoverer copies the record to all logs, has the backups and then the primaries install the values, frees what
//! the transaction has locked and not written, and closes the record. All other transactions with locks were aborted:
//! the recoverer frees the locks. Last, it releases the id.
//!
//! Recoverers need no lock and no id, may die at any point, and may be several. All requests name their transaction,
//! and members ignore what they have done already.
//!
//! Differs from the paper (failure handling): the paper describes recovery, and its code has none. There an epoch is
//! that of a configuration of the cluster, also if a coordinator has died. Here such an epoch is that of one client id.
//! Configurations change only if a member has lost its memory (module `configuration`).
//!
//! Invariant: a client that has not joined before it is fenced never joins, so a recoverer that finds nothing may free
//! the id.
//! Invariant: no verdict is given before all members admit only the recoverer's epoch, nor by what a member has told
//! after it has admitted a later one.
//! Invariant: a record is closed once all primaries have installed its transaction and hold no lock of it. So a later
//! recoverer that no longer finds the record finds no lock either.

use super::layout::{RecordHeader, TxnId, Write};
use super::mutants;
use super::request::{LaneState, RECORD, Status};
use super::site::{Ask, Site};
use crate::lease::{ClientId, Expired, LeaseError};
use crate::rpc::fasst::Batch;
use crate::txn::TxnError;
use crate::txn::session::Recovery;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::collections::BTreeMap;
use zerocopy::FromBytes;

impl<F: Fabric + Clock> Site<F> {
    /// Recovers the client of an expired lease. Stops if another recoverer takes a later epoch, and frees no id then.
    ///
    /// # Errors
    /// [`TxnError`]; the store is as correct as before.
    pub(super) async fn recover(&self, expired: Expired) -> Result<Recovery, TxnError> {
        self.fetch_keys().await?;
        let (id, mut recovery) = (expired.id(), Recovery::default());
        let settled = async {
            let epoch = self.fence(&expired).await?;
            let states = self.raise(id, epoch).await?;
            self.settle_all(id, epoch, &states).await
        };
        (recovery.committed, recovery.aborted) = match settled.await {
            Err(TxnError::Lost) => return Ok(recovery),
            settled => settled?,
        };
        match self.leases.free(expired.fenced_by_epoch().recovered()).await {
            Ok(()) => recovery.clients += 1,
            Err(LeaseError::Lost) => {} // Another client has recovered it.
            Err(error) => return Err(error.into()),
        }
        Ok(recovery)
    }

    /// Commits or aborts all open transactions of a client, whose lanes have these states. Returns how many it has
    /// committed and aborted.
    ///
    /// # Errors
    /// [`TxnError`]; some may have been committed and aborted.
    pub(super) async fn settle_all(
        &self,
        id: ClientId,
        epoch: u64,
        states: &[Vec<LaneState>],
    ) -> Result<(u64, u64), TxnError> {
        let (mut batch, mut committed, mut aborted) = (Batch::new(id.number(), 1), 0, 0);
        for (txn, log) in evidence(states) {
            let record = match log {
                Some((member, lane)) => Some(self.record(&mut batch, epoch, txn, member, lane).await?),
                None => None,
            };
            match record {
                Some(record) => {
                    self.roll_forward(&mut batch, (id, epoch), txn, &record).await?;
                    committed += 1;
                }
                None => {
                    let asks = Self::abort_asks(txn, 0..self.shards.len());
                    self.settle(&mut batch, epoch, &asks).await?;
                    aborted += 1;
                }
            }
        }
        Ok((committed, aborted))
    }

    /// Returns the record of a transaction from the log of a member.
    async fn record(
        &self,
        batch: &mut Batch,
        epoch: u64,
        txn: TxnId,
        member: usize,
        lane: usize,
    ) -> Result<Vec<u8>, TxnError> {
        let response_max = self.shards[member].spec().record_bytes();
        let ask = Ask { response_max, ..Ask::new(member, RECORD, &[lane as u64]) };
        let asked = self.ask_all(batch, epoch, &[ask], false).await;
        let told = asked
            .into_iter()
            .next()
            .expect("an outcome for each request")
            .map_err(|missed| missed.error())?;
        let is_own = RecordHeader::ref_from_prefix(&told.payload)
            .is_ok_and(|(header, writes)| header.txn == txn && header.is_sound(writes));
        match told.status {
            Status::Done if is_own => Ok(told.payload),
            _ => Err(TxnError::Damaged("a log has lost a record that nobody has closed")),
        }
    }

    /// Completes a committed transaction by its record.
    async fn roll_forward(
        &self,
        batch: &mut Batch,
        (id, epoch): (ClientId, u64),
        txn: TxnId,
        record: &[u8],
    ) -> Result<(), TxnError> {
        let damaged = TxnError::Damaged("a record that no client writes");
        let Ok((header, writes)) = RecordHeader::ref_from_prefix(record) else { return Err(damaged) };
        let writes =
            Write::decode_all(writes, self.shards[0].spec()).filter(|writes| self.has_members(writes));
        let (stamp, writes) = (header.stamp.get(), writes.ok_or(damaged)?);
        self.settle(batch, epoch, &self.log_asks(id, record)).await?;
        if mutants::RELEASED_BEFORE_ROLL_FORWARD.is_on() {
            self.settle(batch, epoch, &Self::abort_asks(txn, 0..self.shards.len())).await?;
        }
        self.settle(batch, epoch, &self.backup_asks(txn, stamp, &writes)).await?;
        self.settle(batch, epoch, &self.commit_asks(txn, stamp, &writes, [])).await?;
        // The record does not name the buckets that the transaction has locked and not written.
        if !mutants::VAIN_LOCK_LEFT.is_on() {
            self.settle(batch, epoch, &Self::abort_asks(txn, 0..self.shards.len())).await?;
        }
        self.settle(batch, epoch, &self.close_asks(id, txn)).await
    }
}

/// The open transactions of a client, from the states of its lanes by member: each with a member and a lane that have
/// its record, if there is one.
fn evidence(states: &[Vec<LaneState>]) -> BTreeMap<TxnId, Option<(usize, usize)>> {
    let mut evidence = BTreeMap::new();
    for (member, lanes) in states.iter().enumerate() {
        for (lane, state) in lanes.iter().enumerate() {
            if state.word.has_locks() {
                evidence.entry(state.word.holder).or_insert(None);
            }
            if state.record != TxnId::NONE && !mutants::RECORD_IGNORED.is_on() {
                evidence.insert(state.record, Some((member, lane)));
            }
        }
    }
    evidence
}
