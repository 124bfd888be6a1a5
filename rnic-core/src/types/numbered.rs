//! Enumerations that are written as numbers.

/// Defines an enumeration with the number of each variant, and the way back from a number.
macro_rules! numbered {
    (
        $(#[$meta:meta])*
        pub enum $name:ident: $number:ident, $from:ident {
            $($(#[$doc:meta])* $variant:ident = $n:literal,)+
        }
    ) => {
        $(#[$meta])*
        #[repr($number)]
        pub enum $name {
            $($(#[$doc])* $variant = $n,)+
        }

        impl $name {
            /// The one with this number, if there is one.
            pub fn $from(n: $number) -> Option<Self> {
                match n {
                    $($n => Some($name::$variant),)+
                    _ => None,
                }
            }
        }
    };
}

pub(crate) use numbered;
