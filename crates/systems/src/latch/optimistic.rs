//! Optimistic reads: without the latch, by checks of what was read (section 3).
//!
//! A writer raises the version V under the latch L, and stores V with the content. A read accepts an image if its bytes
//! belong to one version, and if that version is still the newest one when the read *validates*: it reads V again.
//!
//! Differs from the artifact (V2): the validation requires L = 0 as well. While a line of a WRITE is in flight, L is
//! held, and afterwards V has changed. So the read is correct in whatever order the lines of the WRITE land, unless the
//! WRITE itself releases L.

use super::lane::{Lane, Step};
use super::layout::{Layout, Object};
use super::scheme::Reads;
use super::{Attempts, Buffers, Client, FREE, LatchError, copy, mutants};
use farside_remote::clock::Clock;
use farside_remote::{Fabric, read};
use std::rc::Rc;

/// Result of an attempt to read an object.
enum Attempt {
    /// The image in the buffers belongs to this version.
    Whole(u64),
    /// A writer held the latch, with this word.
    Held(u64),
    /// The bytes belong to several versions.
    Torn,
}

impl<F: Fabric + Clock + 'static> Client<F> {
    /// Reads the image of an object into `own`. The lane has no step in progress. It recovers the latch if the latch's
    /// holder is dead.
    pub(super) async fn read_optimistically(
        self: &Rc<Self>,
        object: &Object,
        own: &mut Buffers,
        lane: &Rc<Lane>,
    ) -> Result<(), LatchError> {
        let mut attempts = Attempts::new(self.backoff);
        loop {
            let read = match self.layout.spec.scheme.reads {
                Reads::Twice => self.read_twice(object, own).await?,
                _ => self.read_once(object, own).await?,
            };
            let latch = match read {
                Attempt::Whole(version) if self.is_valid(object, version, own).await? => return Ok(()),
                Attempt::Torn if mutants::HEADER_AND_FOOTER.is_on() && has_equal_ends(&own.image) => {
                    return Ok(());
                }
                Attempt::Whole(_) | Attempt::Torn => FREE.get(),
                Attempt::Held(latch) => latch,
            };
            self.note_failure_of(&mut attempts)?;
            if self.suspects(&attempts, latch) {
                self.carry_out(lane, Step::Await(*object, latch)).await?;
            } else {
                self.back_off(&mut attempts).await;
            }
        }
    }

    /// Reads version and latch, and then the content: two READs, of which the second is sent after the first one has
    /// completed.
    async fn read_twice(&self, object: &Object, own: &mut Buffers) -> Result<Attempt, LatchError> {
        let (key, layout) = (self.layout.table.key, &self.layout);
        let (guard, content) = (layout.guard(), layout.content_range());
        let content_op = || read(object.image.plus(content.start as u64), content.len() as u32);
        own.image.resize(layout.image_len() as usize, 0);
        let mut chain = own.chain.begin(key);
        let guard = chain.also(read(object.image.plus(guard.start as u64), guard.len() as u32));
        let overlapped = mutants::READS_OVERLAP.is_on().then(|| chain.also(content_op()));
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        let (version, latch) = layout.version_and_latch(own.reply.get(guard).map_err(LatchError::Refused)?);
        if latch != FREE.get() {
            return Ok(Attempt::Held(latch));
        }
        let read = match overlapped {
            Some(read) => read,
            None => {
                let mut chain = own.chain.begin(key);
                let read = chain.also(content_op());
                self.fabric.run(self.node, &chain, &mut own.reply).await?;
                read
            }
        };
        own.image[content].copy_from_slice(own.reply.get(read).map_err(LatchError::Refused)?);
        Ok(Attempt::Whole(version))
    }

    /// Reads the whole image by one READ, and checks whether its bytes belong together.
    async fn read_once(&self, object: &Object, own: &mut Buffers) -> Result<Attempt, LatchError> {
        let layout = &self.layout;
        let mut chain = own.chain.begin(layout.table.key);
        let image = chain.also(read(object.image, layout.image_len()));
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        copy(&own.reply, image, &mut own.image)?;
        let (version, latch) = layout.version_and_latch(&own.image[layout.guard()]);
        if latch != FREE.get() {
            return Ok(Attempt::Held(latch));
        }
        let is_whole = match layout.spec.scheme.reads {
            Reads::Versions => Layout::line_versions(&own.image).all(|of_line| of_line == version),
            _ => mutants::NAIVE_READ.is_on() || layout.has_right_checksum(&own.image),
        };
        Ok(if is_whole { Attempt::Whole(version) } else { Attempt::Torn })
    }

    /// Whether an object still has this version.
    async fn is_valid(&self, object: &Object, version: u64, own: &mut Buffers) -> Result<bool, LatchError> {
        let guard = self.layout.guard();
        let mut chain = own.chain.begin(self.layout.table.key);
        let guard = chain.also(read(object.image.plus(guard.start as u64), guard.len() as u32));
        self.fabric.run(self.node, &chain, &mut own.reply).await?;
        let guard = own.reply.get(guard).map_err(LatchError::Refused)?;
        let (version_now, latch) = self.layout.version_and_latch(guard);
        let is_free = self.layout.spec.scheme.reads != Reads::Twice || latch == FREE.get();
        Ok(version_now == version && is_free)
    }
}

/// Whether the first and the last line of an image have the same version.
fn has_equal_ends(image: &[u8]) -> bool {
    let mut versions = Layout::line_versions(image);
    versions.next().is_some_and(|first| versions.last() == Some(first))
}
