//! Scans: leaves from left to right, several in each wave.
//!
//! A scan knows the least key that it has not covered. The cache, or the node above the leaves, names the next leaves,
//! which are read in one wave. Each leaf says which keys it covers, so a leaf that was split since is noticed: the scan
//! steps to its siblings before it goes on. Entries are not sorted, so a leaf's keys are sorted before the visits.
//!
//! Invariant: a leaf is visited only if all its lines are of one version, and no entry is torn.

use super::Client;
use super::layout::{Damaged, Far};
use super::node::{Entry, Image};
use super::session::refused;
use super::walk::{Own, check_steps};
use crate::index::IndexError;
use crate::members::all;
use farside_remote::clock::Clock;
use farside_remote::{ChainBuf, Fabric, Reply, Status, read};

/// Number of leaves that one wave reads.
const LEAVES_PER_WAVE: usize = 32;
/// Bytes that one chain reads, and number of its READs.
const BYTES_PER_CHAIN: usize = 48 << 10;
const READS_PER_CHAIN: usize = 32;

/// How far a scan has come.
#[derive(Debug, Default)]
struct Progress {
    /// Number of keys that were visited.
    visited: usize,
    /// All keys below this one were visited, or are below the scan's start.
    next: Vec<u8>,
}

/// What a leaf was for a scan.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Visited {
    /// Its keys were visited, and there are further leaves.
    More,
    /// The scan is complete.
    All,
    /// The scan's next key is beyond the leaf.
    Before,
    /// The scan's next key is before the leaf.
    Behind,
}

impl<F: Fabric + Clock> Client<F> {
    /// Visits keys from `from` on until there were `limit`, or there are no more. Returns their number.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn scan(
        &self,
        own: &mut Own,
        from: &[u8],
        limit: usize,
        mut visit: impl FnMut(&[u8], &[u8]),
    ) -> Result<usize, IndexError> {
        let (layout, mut follow, mut steps) = (&self.session.layout, None, 0);
        let mut progress = Progress { visited: 0, next: from.to_vec() };
        while progress.visited < limit {
            // Leaves are at least half full, unless keys were deleted.
            let wanted = (limit - progress.visited).div_ceil(layout.form.span() / 2).saturating_add(1);
            let leaves = match follow.take() {
                Some(at) => vec![at],
                None => self.leaves(own, &progress.next, wanted.min(LEAVES_PER_WAVE)).await?,
            };
            if leaves.is_empty() {
                break;
            }
            let images = self.read_many(&leaves, 0).await?;
            let mut sibling = None;
            for (at, image) in leaves.into_iter().zip(images) {
                match image {
                    Some(image) if self.is_complete(&image)? => own.image = image,
                    torn_or_late => {
                        torn_or_late.into_iter().for_each(|_| self.counters.torn.add());
                        self.read_complete(own, at).await?;
                    }
                }
                match self.visit_leaf(&own.image, limit, &mut progress, &mut visit)? {
                    Visited::All => return Ok(progress.visited),
                    Visited::More => (sibling, steps) = (Some(own.image.sibling(layout)?), 0),
                    Visited::Before => {
                        check_steps(&mut steps)?;
                        self.cache.borrow_mut().invalidate(&progress.next);
                        follow = Some(self.step_right(&own.image, &progress.next)?);
                        break;
                    }
                    Visited::Behind => {
                        self.cache.borrow_mut().invalidate(&progress.next);
                        follow = Some(sibling.ok_or(Damaged("leaves that are not in order"))?);
                        break;
                    }
                }
            }
        }
        Ok(progress.visited)
    }

    /// Returns the leaves from the one on that has this key, or is left of it; at most `count`. None if the tree is
    /// empty.
    async fn leaves(&self, own: &mut Own, key: &[u8], count: usize) -> Result<Vec<Far>, IndexError> {
        let cached = self.cache.borrow_mut().find(key, count).map(Iterator::collect::<Vec<Far>>);
        if let Some(leaves) = cached {
            self.counters.cache_hits.add();
            return Ok(leaves);
        }
        self.counters.cache_misses.add();
        own.image = Image::default();
        let Some(first) = self.descend(own, key, 0).await? else { return Ok(Vec::new()) };
        if own.image.is_empty() {
            return Ok(vec![first]); // The root is a leaf.
        }
        let children = own.image.children(&self.session.layout)?.into_iter().map(|(_, at)| at);
        Ok(children.skip_while(|at| *at != first).take(count).collect())
    }

    fn visit_leaf(
        &self,
        image: &Image,
        limit: usize,
        progress: &mut Progress,
        visit: &mut impl FnMut(&[u8], &[u8]),
    ) -> Result<Visited, Damaged> {
        let form = &self.session.layout.form;
        if progress.next.as_slice() < image.low() {
            return Ok(Visited::Behind);
        }
        if image.is_before(form, &progress.next) {
            return Ok(Visited::Before);
        }
        let mut found = Vec::new();
        for index in 0..form.span() {
            if let Entry::Used { key, value } = image.entry(form, index)?
                && key >= progress.next.as_slice()
            {
                found.push((key, value));
            }
        }
        found.sort_unstable();
        // The READ may have met a key twice, if it was deleted and put back meanwhile.
        found.dedup_by_key(|(key, _)| *key);
        for (key, value) in found {
            if progress.visited == limit {
                return Ok(Visited::All);
            }
            visit(key, value);
            progress.visited += 1;
        }
        let Some(high) = image.high(form) else { return Ok(Visited::All) };
        high.clone_into(&mut progress.next);
        Ok(Visited::More)
    }

    /// Reads nodes of one level at once, in as few chains as possible. A node is absent if its READ has met a change of
    /// the whole node, or was late. Reads nothing of members whose READs are late.
    ///
    /// # Errors
    /// [`IndexError`]; nothing was changed.
    pub(super) async fn read_many(&self, nodes: &[Far], level: u8) -> Result<Vec<Option<Image>>, IndexError> {
        let (layout, fabric) = (&self.session.layout, &self.session.fabric);
        let len = layout.form.len(level == 0);
        let mut lists: Vec<Vec<usize>> = Vec::new();
        for member in (0..layout.members.len()).filter(|member| !self.are_late(*member)) {
            let of_member: Vec<usize> =
                (0..nodes.len()).filter(|index| nodes[*index].member() == member).collect();
            let most = (BYTES_PER_CHAIN / len).clamp(1, READS_PER_CHAIN);
            lists.extend(of_member.chunks(most).map(<[usize]>::to_vec));
        }
        let run = lists.iter().map(|list| async move {
            let (mut buffer, mut reply, begun) = (ChainBuf::new(), Reply::new(), fabric.now());
            let member = nodes[list[0]].member();
            let table = &layout.members[member];
            let mut chain = buffer.begin(table.key());
            for index in list {
                chain.also(read(layout.addr(nodes[*index], len as u64)?, len as u32));
            }
            fabric.run(table.node, &chain, &mut reply).await.map_err(IndexError::of_read)?;
            let is_late = self.is_late(member, fabric.now().saturating_sub(begun));
            match reply.verdict() {
                Status::Ok => Ok((reply, is_late)),
                status => Err(refused(status)),
            }
        });
        let mut images = vec![None; nodes.len()];
        for (list, ran) in lists.iter().zip(all(run).await) {
            let (reply, is_late) = ran?;
            for (output, index) in list.iter().enumerate() {
                if is_late {
                    self.counters.late.add();
                    continue;
                }
                let mut image = Image::default();
                match image.decode(&layout.form, level, reply.output(output))? {
                    true => images[*index] = Some(image),
                    false => self.counters.torn.add(),
                }
            }
        }
        Ok(images)
    }
}
