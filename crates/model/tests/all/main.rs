//! Tests of the models: the rules hold in every world, and each broken rule is found.

mod explore;
mod prism_tx;
