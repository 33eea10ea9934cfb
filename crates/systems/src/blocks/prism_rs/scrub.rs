//! Compares the replicas of a block by tag and bytes, and brings those that are behind up to date.
//!
//! A replica that was away while clients wrote stays behind until the next write of the block. A majority has the
//! newest write, so no reader notices; but then the block survives fewer failures than it should. The repair is a write
//! phase with the newest tag and its bytes, at the replicas that lack it.
//!
//! Replicas also differ while a write is in flight. So a difference counts only if a second look shows it again.
//!
//! Invariant: a repair writes under a tag what a replica has under this tag. So it is a write phase of that write.

use super::replica::Failure;
use super::{Found, PrismRs, install, no_majority, read_block};
use crate::blocks::{BlocksError, Scrubbed};
use crate::members::{REPLICAS_MAX, all};
use crate::quorum::Outcomes;
use farside_remote::Fabric;
use farside_remote::clock::Clock;
use std::time::Duration;

/// Answers of all replicas. The bytes are in the replicas' replies.
type Looks = Outcomes<Found, Failure, REPLICAS_MAX>;

impl<F: Fabric + Clock> PrismRs<F> {
    /// Compares all replicas that answer, and repairs those that are behind.
    ///
    /// # Errors
    /// Fewer than a majority answered, or a replica did not take the repair.
    pub(super) async fn compare(&mut self, block: u64) -> Result<Scrubbed, BlocksError> {
        loop {
            match self.compare_once(block).await {
                Err(error) if self.has_moved(&error).await? => {}
                scrubbed => return scrubbed,
            }
        }
    }

    /// Compares the replicas of one configuration.
    ///
    /// # Errors
    /// Those of [`PrismRs::compare`], or the configuration is over.
    async fn compare_once(&mut self, block: u64) -> Result<Scrubbed, BlocksError> {
        self.is_over.set(false);
        let looks = self.look(block).await?;
        let before = self.differences(&looks)?;
        if before.behind.is_empty() && before.damaged.is_empty() {
            return Ok(before);
        }
        let newest_before = newest(&looks).map(|(_, found)| found.tag);
        let looks = self.look(block).await?;
        let mut now = self.differences(&looks)?;
        let lacks = |index: &u32| {
            let found = looks[*index as usize].as_ref().and_then(|look| look.as_ref().ok());
            found.map(|found| found.tag) < newest_before
        };
        now.behind.retain(lacks);
        now.damaged.retain(|index| before.damaged.contains(index));
        let Some((index, found)) = newest(&looks).filter(|_| !now.behind.is_empty()) else { return Ok(now) };
        let bytes =
            self.bytes(index, &found)?.map_or_else(|| vec![0; self.spec.block as usize], <[u8]>::to_vec);
        let (fabric, list, tag) = (&self.fabric, self.list, found.tag);
        let behind = (0..).zip(&mut self.replicas).filter(|(index, _)| now.behind.contains(index));
        let repairs = behind.map(|(_, replica)| {
            let bytes = &bytes;
            replica.run(fabric, async move |access| install(fabric, access, list, block, &tag, bytes).await)
        });
        let repaired = all(repairs).await.into_iter().collect::<Result<Vec<()>, Failure>>();
        repaired.map(|_| now).map_err(|failure| {
            self.is_over.set(failure.is_replaced());
            failure.error
        })
    }

    /// Reads the block at all replicas, once.
    ///
    /// # Errors
    /// Fewer than a majority answered.
    async fn look(&mut self, block: u64) -> Result<Looks, BlocksError> {
        let (fabric, needed) = (&self.fabric, self.majority());
        let found = all(self.replicas.iter_mut().map(|replica| {
            // A replica that does not answer is reported. To wait for it at each block would take too long.
            replica.run_within(Duration::ZERO, fabric, async |access| read_block(fabric, access, block).await)
        }))
        .await;
        let mut looks = [const { None }; REPLICAS_MAX];
        looks.iter_mut().zip(found).for_each(|(look, found)| *look = Some(found));
        let is_replaced = |look: &Result<Found, Failure>| look.as_ref().is_err_and(Failure::is_replaced);
        self.is_over.set(looks.iter().flatten().any(is_replaced));
        match looks.iter().flatten().filter(|look| look.is_ok()).count() >= needed && !self.is_over.get() {
            true => Ok(looks),
            false => Err(no_majority(looks, needed)),
        }
    }

    /// Returns the replicas that lack the newest tag, that have it with other bytes than the first replica with it, and
    /// that did not answer.
    fn differences(&self, looks: &Looks) -> Result<Scrubbed, BlocksError> {
        let mut scrubbed = Scrubbed::default();
        let Some((first, newest)) = newest(looks) else { return Ok(scrubbed) };
        for (index, look) in looks.iter().enumerate() {
            match look {
                None => {}
                Some(Err(_)) => scrubbed.silent.push(index as u32),
                Some(Ok(found)) if found.tag < newest.tag => scrubbed.behind.push(index as u32),
                Some(Ok(found)) if self.bytes(first, &newest)? != self.bytes(index, found)? => {
                    scrubbed.damaged.push(index as u32);
                }
                Some(Ok(_)) => {}
            }
        }
        Ok(scrubbed)
    }

    /// Returns what a look found at a replica; `None` for zeros.
    fn bytes(&self, index: usize, found: &Found) -> Result<Option<&[u8]>, BlocksError> {
        let reply = &self.replicas[index].reply;
        found.bytes.map(|bytes| reply.get(bytes).map_err(BlocksError::Refused)).transpose()
    }
}

/// Returns the first replica with the newest tag, by index, and what it has.
fn newest(looks: &Looks) -> Option<(usize, Found)> {
    let found =
        |look: &Option<Result<Found, Failure>>| look.as_ref().and_then(|look| look.as_ref().ok()).copied();
    let found = looks.iter().enumerate().filter_map(|(index, look)| Some((index, found(look)?)));
    // Of several maxima, `max_by_key` returns the last.
    found.rev().max_by_key(|(_, found)| found.tag)
}
