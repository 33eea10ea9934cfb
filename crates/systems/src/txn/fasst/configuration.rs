//! Configurations: the promotion of backups, after a member has lost its memory.
//!
//! Configuration k is a list of members, and k + 1 is the next list, with an empty newcomer in the place of a lost
//! member. A promoter, which is a client, makes five steps:
//!
//! 1. *Join*: prepare the newcomer under k + 1.
//! 2. *Decide* on the list of k + 1 in the register of k's members (module `members::configuration`). If the list of
//!    another promoter is decided, go on with that one.
//! 3. *Revoke* k's keys at all members of k that have their memory. From here on no packet of k is handled, whoever has
//!    sent it: all coordinators of k have come to their end.
//! 4. *Settle and fill*, by the promoters' keys. Have all members refuse packets of promoters before this one. Settle
//!    the transactions of all clients as a recoverer settles those of a dead one: what a log has is committed, all else
//!    is aborted. Then copy to the newcomer what it had: its primary part from a backup, and its copies from their
//!    primaries. Fills are not refused: a promoter fills once all is settled, and then no other one finds anything.
//! 5. *Enable* k + 1 at its members, each by itself. Each gives clients its key of k + 1 from then on, and no promoter
//!    has one any more.
//!
//! A promoter that finds k + 1 enabled at one member skips to the rest of step 5. Promoters may die anywhere, and
//! several may run at the same time: each step may be repeated, and none is undone. Clients of k get no key of k + 1.
//! They learn that the store was opened in a former configuration, and open it again.
//!
//! Why nothing committed is lost, as long as at most f members have lost their memory:
//! * A transaction is reported as committed once all f + 1 logs have its record, and the record is closed once all
//!   copies and primaries have its values. So a log with the record lives, or at least one copy has all values.
//! * Step 4 begins once the keys are revoked everywhere, and packets of earlier promoters are refused, so no record
//!   comes to a log that was read before. A promoter copies a record to all live logs before it installs a value. So
//!   one that follows it finds the record, too, even if another member is lost meanwhile.
//! * Until a member is enabled, it handles packets of promoters alone. These agree, since what they read in step 4 does
//!   not change except by themselves. All that they write may be repeated, by the rules for lanes and stamps.
//! * No client of k + 1 has a key before the newcomer has all that it had.
//!
//! If another member is lost before k + 1 is enabled, its part is not read, and what it had comes from other members.
//! The others go on to k + 1 with it, where clients do not open the store, and then to k + 2 without it.
//!
//! Differs from the paper (failure handling): there, leases of members decide who is dead, so that machines which do
//! not answer are replaced. Here a member is replaced once its node has come back without its memory. While a member of
//! k does not answer, it might still serve reads of k, so step 3 waits for it.
//!
//! Invariant: nothing is settled, filled or enabled for a list that is not decided.
//! Invariant: a promoter never fetches a key: the one that it would get may be that of clients of k + 1.

use super::layout::{BucketHead, Place, SlotHead, SlotKind, Write};
use super::request::{FILL, PROMOTION, RAISE};
use super::site::{Ask, Site};
use super::{KIND, mutants};
use crate::lease::ClientId;
use crate::members::configuration::View;
use crate::members::{MemberId, Place as Held};
use crate::registry::named;
use crate::rpc::fasst::Batch;
use crate::store::{Loss, Member, Members, StoreError};
use crate::txn::TxnError;
use farside_remote::clock::Clock;
use farside_remote::control::{MemberState, Membership};
use farside_remote::draws::Draws;
use farside_remote::{ChainBuf, Fabric, NodeId, Out, Reply, read, read_as};
use std::rc::Rc;
use std::time::Duration;

/// Number of times that steps 3 to 5 are tried until their error is returned.
const ROUNDS: u32 = 8;
/// Pause after the first failure of these steps. Each further pause is twice as long, and at least twice as long as the
/// steps took until they failed. A random part of it comes on top.
const PAUSE: Duration = Duration::from_millis(2);
/// Longest pause because of the time that the steps took.
const PAUSE_MAX: Duration = Duration::from_secs(1);
/// Number of buckets, and of bytes of keys and values, that one chain reads.
const BUCKETS: u64 = 32;
const BYTES: usize = 32 << 10;
/// Largest number of pairs that one chain reads.
const PAIRS: usize = 32;

/// What a promotion has done.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Promoted {
    /// Number of transactions that were committed, and that were aborted.
    committed: u64,
    aborted: u64,
    /// Number of slots that the newcomer got.
    filled: u64,
}

/// Completes unfinished promotions, and replaces each member whose node has lost its memory. Returns a sentence for
/// each repair.
///
/// # Errors
/// [`StoreError`]; the store is as correct as before. More members may have lost their memory than it survives.
pub(super) async fn heal<F: Fabric + Clock>(
    fabric: &Rc<F>,
    members: &Members,
    entropy: u64,
) -> Result<Vec<String>, StoreError> {
    let mut repairs = Vec::new();
    if losses(members) == 0 {
        return Ok(repairs);
    }
    let mut promoter = Promoter { fabric, members, numbers: Draws(entropy) };
    loop {
        if let Some(configuration) = promoter.complete().await? {
            repairs.push(format!("completed a promotion of backups: configuration {configuration} serves"));
        }
        let view = View::of(&**fabric, members).await?;
        let Some((index, by)) = view.begun().map_or_else(|| lost(&view, members), |begun| Ok(Some(begun)))?
        else {
            return Ok(repairs);
        };
        let before = view.configuration;
        let (configuration, promoted) = match promoter.replace(view, index, by).await {
            Ok(replaced) => replaced,
            // Another promoter was first.
            Err(_) if View::of(&**fabric, members).await?.configuration > before => continue,
            Err(error) => return Err(error),
        };
        let Promoted { committed, aborted, filled } = promoted;
        repairs.push(format!(
            "replaced member {index}, which had lost its memory, at node {}: {filled} keys and copies filled, \
             {committed} transactions completed, {aborted} aborted; configuration {configuration} serves",
            by.0
        ));
    }
}

/// Number of members that the store may lose at the same time.
fn losses(members: &Members) -> usize {
    let store = members.store();
    let count = store.membership.as_ref().map_or(1, |of| of.members.len());
    named(KIND).map_or(0, |system| (system.losses)(&store.parameters, count))
}

/// Returns the first member whose node has another memory, with that node.
///
/// # Errors
/// More members have lost their memory than the store survives; or a member has, and it is not certain which node held
/// it.
fn lost(view: &View, members: &Members) -> Result<Option<(usize, NodeId)>, StoreError> {
    let Some((index, node)) = view.lost().next() else { return Ok(None) };
    if view.lost().count() > losses(members) {
        let (name, member, loss) = (view.name.clone(), index as u32, Loss::Items);
        return Err(StoreError::MemoryLost { name, member, node, loss });
    }
    match view.returned() {
        Some(lost) => Ok(Some(lost)),
        None => Err(StoreError::Gone(format!(
            "member {index} of store '{}' has lost its memory, and which node held it is not certain: name the nodes \
             in --pool in the order in which they were when the store was created",
            view.name
        ))),
    }
}

/// A client that replaces members.
struct Promoter<'a, F> {
    fabric: &'a Rc<F>,
    members: &'a Members,
    /// Draws the number of each decision.
    numbers: Draws,
}

impl<F: Fabric + Clock> Promoter<'_, F> {
    async fn view(&self) -> Result<View, StoreError> {
        View::of(&**self.fabric, self.members).await
    }

    /// Completes a promotion that is decided or may be, and drops newcomers whose lists lost. Returns the number of the
    /// configuration if anything was completed.
    async fn complete(&mut self) -> Result<Option<u64>, StoreError> {
        let mut completed = None;
        for _ in 0..ROUNDS {
            let mut view = self.view().await?;
            if view.places.iter().any(|place| matches!(place, Held::Behind(_))) {
                let (configuration, list) = (view.configuration, view.members.clone());
                if view.enable_all(&**self.fabric, configuration, &list).await? > 0 {
                    completed = Some(configuration);
                    view = self.view().await?;
                }
            }
            let is_revoked =
                view.places.iter().any(|place| matches!(place, Held::Holds(_, MemberState::Revoked)));
            let Some(accepted) = view.last_accepted() else {
                if is_revoked {
                    // The members that have accepted the next configuration do not answer.
                    return Err(StoreError::BeingReplaced { name: view.name });
                }
                view.drop_others(&**self.fabric).await;
                return Ok(completed);
            };
            let proposal = accepted.members.clone();
            // A single accepted list proves nothing: run the ballot.
            let Some(list) = view.decide(&**self.fabric, &proposal, self.numbers.next()).await? else {
                continue;
            };
            completed = Some(self.finish(&view, &list).await?.0);
        }
        Ok(completed)
    }

    /// Makes the five steps. Returns the number of the configuration that serves then.
    async fn replace(&mut self, view: View, index: usize, by: NodeId) -> Result<(u64, Promoted), StoreError> {
        let Some(incarnation) = view.incarnation(by) else {
            return Err(StoreError::BeingReplaced { name: view.name });
        };
        let mut list = view.members.clone();
        list[index] = MemberId { node: by.0, incarnation };
        let membership = Membership {
            attempt: view.attempt,
            state: MemberState::Joining,
            index: index as u32,
            configuration: view.configuration + 1,
            members: list.clone(),
        };
        view.join_by(&**self.fabric, self.members, by, &membership).await?;
        let Some(decided) = view.decide(&**self.fabric, &list, self.numbers.next()).await? else {
            return Err(StoreError::BeingReplaced { name: view.name });
        };
        let done = self.finish(&view, &decided).await?;
        if decided != list {
            // Another newcomer was decided on. This one may join the next configuration.
            view.leave(&**self.fabric, by, &membership).await;
        }
        Ok(done)
    }

    /// Steps 3 to 5, for a list that was decided.
    async fn finish(&mut self, of: &View, list: &[MemberId]) -> Result<(u64, Promoted), StoreError> {
        let next = of.configuration + 1;
        let mut error = StoreError::BeingReplaced { name: of.name.clone() };
        let mut took = Duration::ZERO;
        for round in 0..ROUNDS {
            if round > 0 {
                // Another promoter may have begun within the round before. It gets time for its own.
                let pause = (PAUSE * (1 << round)).max((2 * took).min(PAUSE_MAX));
                let more = self.numbers.below(pause.as_nanos() as u64);
                self.fabric.sleep(pause + Duration::from_nanos(more)).await;
            }
            let begun = self.fabric.now();
            let view = self.view().await?;
            let promoted = match view.configuration >= next {
                // One member of k + 1 serves it, so steps 3 and 4 were completed.
                true => Promoted::default(),
                false => match self.settle_and_fill(&view, list).await {
                    Ok(promoted) => promoted,
                    Err(failure) => {
                        (error, took) = (failure, self.fabric.now().saturating_sub(begun));
                        continue;
                    }
                },
            };
            // If a member serves k + 1 already, its list is the decided one.
            let (configuration, list) = match view.configuration >= next {
                true => (view.configuration, &view.members[..]),
                false => (next, list),
            };
            let enabled = view.enable_all(&**self.fabric, configuration, list).await;
            let view = self.view().await?;
            if view.configuration >= next {
                view.drop_others(&**self.fabric).await;
                return Ok((view.configuration, promoted));
            }
            error = enabled.err().unwrap_or(error);
        }
        Err(error)
    }

    /// Steps 3 and 4.
    async fn settle_and_fill(&self, view: &View, list: &[MemberId]) -> Result<Promoted, StoreError> {
        let listed = self.revoked(view, list).await?;
        let is_newcomer = |(member, before): (&MemberId, &MemberId)| member.incarnation != before.incarnation;
        let newcomers = list.iter().zip(&view.members).enumerate().filter(|(_, pair)| is_newcomer(*pair));
        let newcomers: Vec<usize> = newcomers.map(|(index, _)| index).collect();
        let site = Site::promoting(Rc::clone(self.fabric), &listed)?;
        let mut promoted = Promoted::default();
        if mutants::FILLED_EARLY.is_on() {
            for newcomer in &newcomers {
                promoted.filled += site.fill(*newcomer, &view.name).await?;
            }
        }
        (promoted.committed, promoted.aborted) = match site.settle_for_all().await {
            Err(TxnError::Lost) => return Err(StoreError::BeingReplaced { name: view.name.clone() }),
            settled => settled?,
        };
        for newcomer in newcomers.iter().filter(|_| !mutants::FILLED_EARLY.is_on()) {
            promoted.filled += site.fill(*newcomer, &view.name).await?;
        }
        Ok(promoted)
    }

    /// Step 3. Returns the members of the next configuration, with the promoters' keys. Members that are lost have
    /// errors.
    async fn revoked(&self, view: &View, list: &[MemberId]) -> Result<Members, StoreError> {
        let name = || view.name.clone();
        // A member is lost if all nodes have answered, and none of them has its memory.
        let are_all = (0..self.members.nodes()).all(|node| view.incarnation(NodeId(node)).is_some());
        let mut nodes = Vec::new();
        for member in list.iter().chain(&view.members) {
            match view.node_of(member) {
                Some(node) if !nodes.contains(&node) => nodes.push(node),
                None if !are_all => return Err(StoreError::BeingReplaced { name: name() }),
                _ => {}
            }
        }
        let mut parts = Vec::new();
        for part in view.revoke(&**self.fabric, &nodes, |_| false).await {
            match part {
                Ok(part) => parts.push(part),
                Err((_, error)) => return Err(error),
            }
        }
        let part_of = |member: &MemberId| {
            let node = view.node_of(member)?;
            parts.iter().map(|part| &part.list()[0]).find(|part| part.node == node)
        };
        let listed = list.iter().zip(0..).map(|(member, index)| match part_of(member) {
            Some(part) => part.clone(),
            None => {
                let (node, loss) = (NodeId(member.node), Loss::Replaceable);
                let store = Err(StoreError::MemoryLost { name: name(), member: index, node, loss });
                Member { node, session: 0, store }
            }
        });
        Members::of(listed.collect(), self.members.nodes())
    }
}

/// A slot with its content.
struct Pair {
    place: Place,
    slot: SlotHead,
    bytes: Vec<u8>,
}

impl<F: Fabric + Clock> Site<F> {
    /// Settles the transactions of all clients, as their only promoter. Returns how many were committed and aborted.
    ///
    /// # Errors
    /// [`TxnError`]; some may be settled. [`TxnError::Lost`] if another promoter has begun.
    async fn settle_for_all(&self) -> Result<(u64, u64), TxnError> {
        let (mut committed, mut aborted) = (0, 0);
        let epoch = self.promote().await?;
        for id in (1..=self.shards[0].spec().ids).filter_map(ClientId::new) {
            let states = self.look_at_all(id, epoch).await?;
            let settled = self.settle_all(id, epoch, &states).await?;
            (committed, aborted) = (committed + settled.0, aborted + settled.1);
            if !mutants::EPOCHS_KEPT.is_on() {
                let asks: Vec<Ask> =
                    (0..self.shards.len()).map(|member| Ask::new(member, RAISE, &[])).collect();
                self.settle(&mut Batch::new(id.number(), 0), epoch, &asks).await?;
            }
        }
        Ok((committed, aborted))
    }

    /// Copies to a newcomer what it had, from members that have the same. Returns the number of slots. A newcomer that
    /// is lost again gets nothing.
    ///
    /// # Errors
    /// [`StoreError`]; the newcomer may lack anything.
    async fn fill(&self, newcomer: usize, name: &str) -> Result<u64, StoreError> {
        let mut filled = 0;
        if self.is_lost(newcomer) {
            return Ok(filled);
        }
        let (members, backups) = (self.shards.len(), self.shards[newcomer].spec().backups);
        for part in 0..=backups {
            // The primary whose keys this part has.
            let primary = (newcomer + members - usize::from(part)) % members;
            let copies = (0..=backups).filter(|copy| *copy != part);
            let copies = copies.map(|copy| ((primary + usize::from(copy)) % members, copy));
            let source = copies.into_iter().find(|(member, _)| !self.is_lost(*member));
            let Some((source, copy)) = source else {
                let (node, member) = (self.shards[primary].node, primary as u32);
                let (name, loss) = (name.to_owned(), Loss::Items);
                return Err(StoreError::MemoryLost { name, member, node, loss });
            };
            filled += self.fill_part(newcomer, part, primary, (source, copy)).await?;
        }
        Ok(filled)
    }

    /// Copies one part to a newcomer. Returns the number of slots.
    async fn fill_part(
        &self,
        newcomer: usize,
        part: u8,
        primary: usize,
        (source, copy): (usize, u8),
    ) -> Result<u64, TxnError> {
        let (mut batch, mut filled, buckets) =
            (Batch::new(0, 0), 0, self.shards[source].spec().all_buckets());
        let table = &self.shards[newcomer].table;
        for from in (0..buckets).step_by(BUCKETS as usize) {
            let pairs = self.pairs(source, copy, from..buckets.min(from + BUCKETS)).await?;
            let mut asks = Vec::new();
            for Pair { place, slot, bytes } in &pairs {
                let (key, value) = bytes.split_at(slot.key_len.get().into());
                let value = match slot.kind() {
                    SlotKind::Value => Some(value),
                    SlotKind::Absent => None,
                    SlotKind::Free | SlotKind::Busy => {
                        return Err(TxnError::Damaged("a slot that is half written after all transactions"));
                    }
                };
                let bucket = table.bucket_of(key);
                let write = Write { place: *place, bucket, member: primary as u8, key, value };
                let mut ask = Ask::new(newcomer, FILL, &[slot.stamp.get(), bucket, part.into()]);
                write.encode(&mut ask.payload);
                asks.push(ask);
            }
            self.settle(&mut batch, PROMOTION, &asks).await?;
            filled += asks.len() as u64;
        }
        Ok(filled)
    }

    /// Reads the slots that keys have in some buckets, with their content.
    async fn pairs(
        &self,
        member: usize,
        part: u8,
        buckets: std::ops::Range<u64>,
    ) -> Result<Vec<Pair>, TxnError> {
        let shard = &self.shards[member];
        let (mut buffer, mut reply) = (ChainBuf::new(), Reply::new());
        let mut chain = buffer.begin(shard.key());
        let heads: Vec<(u64, Out<BucketHead>)> =
            buckets.map(|bucket| (bucket, chain.also(read_as(shard.table.bucket(part, bucket))))).collect();
        self.fabric.run(shard.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
        let mut pairs = Vec::new();
        for (bucket, head) in heads {
            let head: &BucketHead = reply.get(head).map_err(TxnError::Refused)?;
            for (slot, of) in head.slots.iter().enumerate() {
                if of.kind() != SlotKind::Free {
                    pairs.push(Pair { place: Place { bucket, slot }, slot: *of, bytes: Vec::new() });
                }
            }
        }
        let mut done = 0;
        while done < pairs.len() {
            let mut chain = buffer.begin(shard.key());
            let (mut outs, mut bytes) = (Vec::new(), 0);
            for Pair { place, slot, .. } in pairs[done..].iter().take(PAIRS) {
                let len = u32::from(slot.key_len.get()).saturating_add(slot.value_len.get());
                let len = len.min(shard.spec().pair_max);
                bytes += len as usize;
                if bytes > BYTES && !outs.is_empty() {
                    break;
                }
                outs.push(chain.also(read(shard.table.pair(part, *place), len)));
            }
            self.fabric.run(shard.node, &chain, &mut reply).await.map_err(TxnError::of_read)?;
            for out in outs {
                let pair = &mut pairs[done];
                pair.bytes = reply.get(out).map_err(TxnError::Refused)?.to_vec();
                if pair.bytes.len() < pair.slot.key_len.get().into() {
                    return Err(TxnError::Damaged("a pair that is shorter than its key"));
                }
                done += 1;
            }
        }
        Ok(pairs)
    }
}
